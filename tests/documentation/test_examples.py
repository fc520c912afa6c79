"""The examples in docstrings are true, and every public class of the rooms below has one."""

import doctest
import importlib
import inspect

import pytest

import pl_privknn
from pl_privknn import labelers, privacy, students, training
from pl_privknn.privacy import mechanisms
from pl_privknn.privacy.accounting import accountant

ROOMS = (pl_privknn, privacy, mechanisms, labelers, students, training)
FINDER = doctest.DocTestFinder(exclude_empty=True)


def _public():
    """Classes and functions that the rooms export, and the accountant's own functions."""
    found = [getattr(room, name) for room in ROOMS for name in room.__all__]
    found += [getattr(accountant, name) for name in ("account", "epsilon_for_delta", "delta_for_epsilon")]
    return {each for each in found if inspect.isclass(each) or inspect.isfunction(each)}


MODULES = sorted({each.__module__ for each in _public()})


@pytest.mark.long("pl_privknn.recommendation.recommend")  # test_recommend.py does the same with less
@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner()
    for test in FINDER.find(importlib.import_module(name)):
        runner.run(test)
    failed, tried = runner.summarize(verbose=False)
    assert tried > 0
    assert failed == 0, "see the standard output"
