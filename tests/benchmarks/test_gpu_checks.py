"""The checks for a GPU keep up with the package: a dry run of some of them on the processor."""

import importlib

import pytest


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setenv("PLACE", "cpu")
    return importlib.import_module("benchmarks.gpu_checks")


@pytest.mark.parametrize(
    "name",
    [
        "labelers_answer_as_on_the_cpu",
        "features_are_those_of_the_cpu",
        "records_go_through_the_step_as_on_the_cpu",
        "a_buffer_that_is_the_private_table_is_refused",
    ],
)
def test_checks_pass_on_the_processor(checks, name):
    passed, figure = getattr(checks, name)()
    assert passed, figure
