"""The catalogue of faults fits the code and the tests; ``python -m tests.faults`` runs it."""

import pytest
from faults.__main__ import chosen
from faults.catalogue import FAULTS
from faults.fault import Fault, FaultError
from faults.runner import ROOT, _verdict


def test_faults_have_names_of_their_own_and_say_what_they_do():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 45
    for fault in FAULTS:
        assert fault.harm.endswith("."), fault.name
        assert fault.change, fault.name
        assert fault.tests, fault.name


@pytest.mark.parametrize("module", sorted({fault.module for fault in FAULTS}))
def test_every_fault_finds_its_place_once_and_its_tests(module):
    for fault in FAULTS:
        if fault.module == module:
            text = fault.source(ROOT).read_text(encoding="utf-8")
            assert fault.applied(text) != text
            assert len(fault.node_ids(ROOT / "tests")) == len(fault.tests)


def test_a_fault_that_fits_no_more_is_told():
    fits = {
        "module": "pl_privknn._checks",
        "change": {"a": "b"},
        "tests": ("test_faults::test_is_not_there",),
    }
    fault = Fault("x", "Harm.", **fits)
    with pytest.raises(FaultError, match="2 times"):
        fault.applied("a a")
    with pytest.raises(FaultError, match="0 times"):
        fault.applied("c")
    with pytest.raises(FaultError, match="no Python"):
        Fault("x", "Harm.", **{**fits, "change": {"a": "("}}).applied("a")
    with pytest.raises(FaultError, match="no module"):
        Fault("x", "Harm.", **{**fits, "module": "pl_privknn.nothing"}).source(ROOT)
    with pytest.raises(FaultError, match="no test"):
        fault.node_ids(ROOT / "tests")


def test_only_a_failing_test_counts_as_noticing():
    assert _verdict({"status": 1, "test": "a", "error": "AssertionError"}) == (True, "a")
    for found in (
        {"status": 0},
        {"status": 5},
        {"status": 2, "test": "a", "error": "ImportError"},
        {"status": 1, "test": "a", "error": "NameError"},
    ):
        assert not _verdict(found)[0]


def test_parts_together_are_the_whole():
    parts = [chosen(None, f"{part}/4") for part in (1, 2, 3, 4)]
    assert sorted(fault.name for part in parts for fault in part) == sorted(fault.name for fault in FAULTS)
    for part in ("0/4", "5/4", "x", "1/"):
        with pytest.raises(SystemExit, match="--part"):
            chosen(None, part)
    with pytest.raises(SystemExit, match="no such fault"):
        chosen(["nothing"], None)
