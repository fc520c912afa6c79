"""Audits of whole labelers: honest ones pass, and faults inside them are found.

Seeds are fixed. An audit calls a true claim violated for one seed in 1,000 at most, in each of its rows.
"""

import json

import pytest

from benchmarks.faulty import LessNoise
from pl_privknn import Laplace
from pl_privknn.auditing.releases import SETTINGS, audit_labeler
from pl_privknn.cli.main import main
from pl_privknn.labelers import PrivateKNN, ReverseKNN
from pl_privknn.privacy.noise import SeededNoise

TRIALS = 3000


class MoreCoins(LessNoise):
    """Coins of the double rate, under the same charges; streams keep the class and the factor."""

    def bernoulli(self, shape, p):
        return super().bernoulli(shape, min(1.0, 2 * p))


def verdicts(kind, noise):
    found = audit_labeler(kind, runs=TRIALS, canaries=TRIALS, breach=False, noise=noise)
    return {each.subject.split(", ")[1]: each.verdict for each in found}


@pytest.mark.long("PrivateKNN", "IndKNN")
@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_honest_labelers_pass_and_less_noise_is_found(kind):
    assert set(verdicts(kind, SeededNoise(1)).values()) == {"OK"}
    assert set(verdicts(kind, LessNoise(2.0, SeededNoise(1))).values()) == {"VIOLATED"}


def test_coins_of_twice_the_rate_are_found():
    assert verdicts(PrivateKNN, MoreCoins(1.0, SeededNoise(1)))["counts"] == "VIOLATED"


def test_a_class_of_ones_own_is_run_with_its_own_code():
    class Charges(PrivateKNN):
        def charge_and_draw(self, ledger, mechanism, count, key):
            return LessNoise(2.0, super().charge_and_draw(ledger, mechanism, count, key))

    class Own(ReverseKNN):
        def __init__(self):
            super().__init__(noise=Laplace(0.3))

        def plan(self, *given, **named):
            return ReverseKNN(noise=Laplace(1.0)).plan(*given, **named)

    for kind in (Charges, Own):
        rows = audit_labeler(kind, runs=TRIALS, canaries=TRIALS, breach=False, noise=SeededNoise(1))
        assert {row.subject.split(",")[0] for row in rows} == {kind.__name__}
        assert all(row.violated for row in rows)


COMMAND = ["audit", "--empirical", "--canaries", "1000", "--seed", "1"]


def test_the_command_audits_labelers(capsys, monkeypatch):
    assert main([*COMMAND, "--labeler", "ReverseKNN"]) == 0
    assert "ReverseKNN, counts" in capsys.readouterr().out
    assert main([*COMMAND, "--labeler", "pl_privknn.labelers.ReverseKNN"]) == 0
    draw = SeededNoise.rounded_laplace
    monkeypatch.setattr(
        SeededNoise, "rounded_laplace", lambda self, shape, scale: draw(self, shape, scale / 3)
    )
    assert main([*COMMAND, "--labeler", "ReverseKNN", "--json"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["audits"][0]["verdict"] == "VIOLATED"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (COMMAND, "give either a ledger's file or --labeler"),
        ([*COMMAND, "ledger.sqlite", "--labeler", "PATE"], "give either a ledger's file or --labeler"),
        ([*COMMAND, "--labeler", "KNN"], "--labeler KNN must be a labeler of ours, such as PrivateKNN"),
        ([*COMMAND, "--labeler", "json.JSONDecoder"], "is no class derived from Labeler"),
        ([*COMMAND, "--labeler", "PATE", "--adjacency", "replace_one"], "--adjacency belongs to a ledger"),
        ([*COMMAND[:2], "--labeler", "pl_privknn.labelers.NoisySGDTeacher"], "noise_multiplier=None"),
        (["audit"], "name the ledger's file"),
        ([*COMMAND[:2], "--runs", "9", "--labeler", "PATE"], "runs=9"),
    ],
)
def test_mistakes_are_one_line(capsys, words, told):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
