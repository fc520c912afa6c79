"""Stated bounds are rounded to their safe side."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pl_privknn._checks import at_least, at_most


@given(st.floats(1e-12, 1e12), st.integers(1, 9))
def test_an_upper_bound_never_reads_smaller_and_a_lower_bound_never_larger(bound, digits):
    up, down = float(at_most(bound, digits)), float(at_least(bound, digits))
    slack = 2e-12 * bound
    assert down - slack <= bound <= up + slack
    assert up - down <= 2 * 10 ** (1 - digits) * bound + 2 * slack  # both keep the digits


def test_figures_that_were_once_rounded_the_wrong_way():
    assert at_most(2.718, 2) == "2.8"
    assert at_most(4.8649, 3) == "4.87"
    assert at_most(1 + 1e-15) == at_least(1 - 1e-15) == "1"
    assert (at_most(math.inf), at_most(0.0)) == ("∞", "0")
