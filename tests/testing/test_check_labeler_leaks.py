"""Faults that strangers invented: what is private leaves a labeler beside its release, or for some tables alone."""

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pl_privknn import Gaussian, PrivateKNN
from pl_privknn.cli.main import main
from pl_privknn.testing import LabelerCheckError, check_labeler


class Honest(PrivateKNN):
    def __init__(self):
        super().__init__(5, 1.0, None, Gaussian(3.0))


def leaking(leak):
    """A labeler that lets something out as it takes the private table."""

    class Leaking(Honest):
        def fit(self, features, labels, num_classes):
            super().fit(features, labels, num_classes)
            leak(self, labels)

    return Leaking


def to_the_module(labeler, labels):
    global LAST
    LAST = labels


Prints = leaking(lambda labeler, labels: print(labels.tolist()))
#: What leaves, and what the check says of it.
LEAKS = {
    "an attribute": (lambda self, y: setattr(self, "counts", torch.bincount(y)), "public attributes differ"),
    "an attribute of an attribute": (
        lambda self, y: setattr(self, "seen", SimpleNamespace(mean=y.numpy().mean())),
        "public attributes differ",
    ),
    "an attribute of the class": (
        lambda self, y: setattr(type(self), "n", int(y.sum())),
        "of the class or its module",
    ),
    "the module": (to_the_module, "attributes of the class or its module differ"),
    "standard output": (lambda self, y: print(y.sum()), "logs or warnings differ"),
    "standard error": (lambda self, y: print(y.sum(), file=sys.stderr), "logs or warnings differ"),
    "a file descriptor": (lambda self, y: os.write(1, str(y.tolist()).encode()), "logs or warnings differ"),
    "a log": (lambda self, y: logging.getLogger("own").warning("%s", y.tolist()), "logs or warnings differ"),
    "a warning": (lambda self, y: warnings.warn(str(y.tolist()), stacklevel=1), "logs or warnings differ"),
    "a file": (lambda self, y: Path("counts.txt").write_text(str(y)), "writes a file .'counts.txt'"),
    "a temporary file": (lambda self, y: tempfile.mkstemp(str(int(y.sum()))), "writes a file"),
    "a program": (lambda self, y: subprocess.run(["true", str(y.sum())], check=False), "starts a program"),
    "the environment": (
        lambda self, y: os.environ.update(SUM=str(y.sum())),
        "environment variables differ.*'SUM'",
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_leaves_while_a_table_is_taken_is_found(name):
    leak, told = LEAKS[name]
    with pytest.raises(LabelerCheckError, match=told) as caught:
        check_labeler(leaking(leak)())
    assert "\n" not in str(caught.value)


class RaisesByTheTable(Honest):
    def label(self, queries, ledger, max_answers=None):
        if self._rare:
            raise ValueError("a class has one record")
        return super().label(queries, ledger, max_answers)

    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self._rare = 1 in torch.bincount(labels)


class CountInTheKey(Honest):
    def charge_and_draw(self, ledger, mechanism, count, key):
        return super().charge_and_draw(ledger, mechanism, count, f"{key} {self._n}")

    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self._n = int((labels == 0).sum())


class Memorises(Honest):
    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self._known = features, labels

    def label(self, queries, ledger, max_answers=None):
        release = super().label(queries, ledger, max_answers)
        features, labels = self._known
        for place, query in enumerate(queries):
            same = (features == query).all(dim=1).nonzero()
            if len(same) and release.labels[place] >= 0:
                release.labels[place] = labels[same[0, 0]]
        return release


class MajorityOfManyRecords(Honest):
    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self._most = int(torch.bincount(labels).argmax()) if len(labels) > 500 else None

    def label(self, queries, ledger, max_answers=None):
        release = super().label(queries, ledger, max_answers)
        if self._most is not None:
            release.labels[:] = self._most
        return release


FAULTS = {
    RaisesByTheTable: "label raises ValueError on a table that fit took",
    CountInTheKey: "keys differ",
    Memorises: "records as queries.*labels differ",
    MajorityOfManyRecords: "many records.*labels differ",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_leaves_beside_the_release_is_found(kind):
    with pytest.raises(LabelerCheckError, match=FAULTS[kind]) as caught:
        check_labeler(kind())
    assert "\n" not in str(caught.value)


def test_the_command_checks_a_class(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_teacher", sys.modules[__name__])
    assert main(["check", "own_teacher.Honest"]) == 0
    assert "all passed" in capsys.readouterr().out
    assert main(["check", "own_teacher.Prints"]) == 1
    assert "logs or warnings differ" in capsys.readouterr().out
    assert main(["check", "IndKNN"]) == 2
    assert "can't be made without arguments" in capsys.readouterr().err
