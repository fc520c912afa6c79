"""Audits of whole labelers: honest ones pass, and faults inside them are found.

Seeds are fixed. An audit calls a true claim violated for one seed in 1,000 at most, in each of its rows.
"""

import json

import pytest

from pl_privknn.cli.main import main
from pl_privknn.labelers import PATE, PrivateKNN, ReverseKNN, private_knn, reverse_knn
from pl_privknn.labelers.base import Labeler
from pl_privknn.privacy.noise import NoiseSource, SeededNoise
from pl_privknn.testing import audit_labeler
from pl_privknn.testing.scenes import SCENES

TRIALS = 2000


class Tampered(NoiseSource):
    """Noise of the half scale, or coins of the double rate, under the same charges."""

    cryptographic = False

    def __init__(self, source, share=1.0, rate=1.0):
        self.source, self.share, self.rate = source, share, rate

    def random_words(self, count):
        return self.source.random_words(count)

    def stream(self, *key):
        return Tampered(self.source.stream(*key), self.share, self.rate)

    def normal(self, shape, scale):
        return super().normal(shape, self.share * scale)

    def laplace(self, shape, scale):
        return super().laplace(shape, self.share * scale)

    def gumbel(self, shape, scale):
        return super().gumbel(shape, self.share * scale)

    def bernoulli(self, shape, p):
        return super().bernoulli(shape, self.rate * p)


def verdicts(kind, **faults):
    rows = audit_labeler(kind, trials=TRIALS, noise=Tampered(SeededNoise(1), **faults))
    return {row["scene"]: row["verdict"] for row in rows}


@pytest.mark.long("PrivateKNN", "IndKNN")
@pytest.mark.parametrize("kind", SCENES, ids=lambda kind: kind.__name__)
def test_honest_labelers_pass_and_half_the_noise_is_found(kind):
    assert set(verdicts(kind).values()) == {"OK"}
    found = verdicts(kind, share=0.5)
    found.pop("clipping", None)  # a clipped vote of many attributes is shorter than what is charged
    assert set(found.values()) == {"VIOLATED"}


def test_coins_of_twice_the_rate_are_found():
    found = verdicts(PrivateKNN, rate=2.0)
    found.pop("clipping", None)
    assert set(found.values()) == {"VIOLATED"}


@pytest.mark.parametrize(("kind", "module"), [(PrivateKNN, private_knn), (ReverseKNN, reverse_knn)])
def test_unclipped_votes_are_found(monkeypatch, kind, module):
    monkeypatch.setattr(module, "clip_attributes", lambda labels, tau: labels.double())
    found = verdicts(kind)
    assert found.pop("clipping") == "VIOLATED"
    assert set(found.values()) == {"OK"}


def test_a_derived_class_is_run_with_its_own_code():
    class Charges(PrivateKNN):
        def paid(self, ledger, mechanism, count, key):
            return Tampered(super().paid(ledger, mechanism, count, key), share=0.5)

    rows = audit_labeler(Charges, trials=TRIALS, noise=SeededNoise(1))
    assert {row["labeler"] for row in rows} == {"Charges"}
    assert {row["verdict"] for row in rows if row["scene"] != "clipping"} == {"VIOLATED"}


def test_the_score_comes_close_to_the_claim():
    """Where noise is Gaussian and nothing is sampled, μ of the runs is half of the stated one at least."""
    (counts, _) = audit_labeler(PATE, trials=3 * TRIALS, noise=SeededNoise(2))
    assert counts["method"] == "gaussian_dp"
    assert 0.5 * counts["claimed"] < counts["empirical"] <= counts["claimed"]


COMMAND = ["audit", "--empirical", "--trials", "1000", "--seed", "1"]


def test_the_command_audits_labelers(capsys, monkeypatch):
    assert main([*COMMAND, "--labeler", "ReverseKNN"]) == 0
    assert "ReverseKNN, counts" in capsys.readouterr().out
    draw = SeededNoise.laplace
    monkeypatch.setattr(SeededNoise, "laplace", lambda self, shape, scale: draw(self, shape, scale / 3))
    assert main([*COMMAND, "--labeler", "ReverseKNN", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["audits"][0]["verdict"] == "VIOLATED"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (COMMAND, "give either a ledger's file or --labeler"),
        ([*COMMAND, "ledger.sqlite", "--labeler", "PATE"], "give either a ledger's file or --labeler"),
        ([*COMMAND, "--labeler", "KNN"], "--labeler KNN must be one of PrivateKNN"),
        ([*COMMAND, "--labeler", "PATE", "--adjacency", "replace_one"], "--adjacency belongs to a ledger"),
        (["audit"], "name the ledger's file"),
        ([*COMMAND[:2], "--trials", "9", "--labeler", "PATE"], "trials=9"),
    ],
)
def test_mistakes_are_one_line(capsys, words, told):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_class_without_scenes_is_refused():
    with pytest.raises(ValueError, match="kind=Labeler has no scenes"):
        audit_labeler(Labeler)
