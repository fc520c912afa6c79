"""Tests that something is refused, and in which words."""

import pytest

REFUSED = (ValueError, TypeError, RuntimeError, OSError)


def refusals(cases):
    """A test of each of ``cases``: what is called, by a pattern of the words with which it is refused."""

    @pytest.mark.parametrize("words", cases)
    def test(words):
        with pytest.raises(REFUSED, match=words):
            cases[words]()

    return test
