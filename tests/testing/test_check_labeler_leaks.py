"""Faults that strangers invented: what is private leaves a labeler beside its release, or for some tables alone."""

import sys

import pytest
import torch

from pl_privknn import Gaussian, PrivateKNN
from pl_privknn.cli.main import main
from pl_privknn.testing import LabelerCheckError, check_labeler


class Honest(PrivateKNN):
    def __init__(self):
        super().__init__(5, 1.0, None, Gaussian(3.0))


class Shows(Honest):
    def fit(self, features, labels, num_classes):
        super().fit(features, labels, num_classes)
        self.counts = torch.bincount(labels)


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
    Shows: "public attributes differ",
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
    assert main(["check", "own_teacher.Shows"]) == 1
    assert "public attributes differ" in capsys.readouterr().out
    assert main(["check", "IndKNN"]) == 2
    assert "can't be constructed without arguments" in capsys.readouterr().err
