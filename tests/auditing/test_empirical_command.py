"""Audits of whole lists of mechanisms, and the command; seeds are fixed."""

import json
import math

import numpy as np
import pytest

from pl_privknn.auditing import audit, audit_records
from pl_privknn.auditing.mechanisms import experiment_of
from pl_privknn.cli.main import main
from pl_privknn.privacy.accounting.pld import gaussian_epsilon
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian, GaussianDPStream, Laplace
from pl_privknn.privacy.noise import SeededNoise

ROOT2 = math.sqrt(2.0)


def test_lists_are_audited_one_by_one_and_together():
    charges = [Charge(Gaussian(8.0), 2), Charge(GaussianDPStream(0.2)), Charge(Laplace(4.0), 1_000_000)]
    rows = audit_records(charges, trials=2000, noise=SeededNoise(15))
    assert [row["subject"] for row in rows] == ["gaussian", "gaussian_dp_stream", "laplace", "all of them"]
    assert [row["verdict"] for row in rows] == ["OK", "NOT DRAWN", "OK", "OK"]
    assert rows[2]["releases"] == 2500
    assert rows[2]["recorded"] == 1_000_000
    assert rows[3]["releases"] == 2502


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([Charge(Gaussian(4.0), 2).to_record()]))
    return path


COMMAND = ["--empirical", "--delta", "1e-5", "--trials", "5000", "--seed", "1"]


def test_the_command_agrees_with_honest_noise_and_fails_for_less(records, capsys, monkeypatch):
    assert main(["audit", str(records), *COMMAND, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["violated"]
    assert report["audits"][0]["epsilon"] == pytest.approx(gaussian_epsilon(ROOT2 / 4, 1e-5), rel=1e-3)
    draw = Gaussian.add_noise
    for scale, status, verdict in ((1, 0, "OK"), (2, 1, "VIOLATED")):
        monkeypatch.setattr(
            Gaussian, "add_noise", lambda self, x, noise, scale=scale: draw(self, x * scale, noise)
        )
        assert main(["audit", str(records), *COMMAND]) == status
        assert verdict in capsys.readouterr().out


def test_the_command_reads_what_a_ledger_has_charged(tmp_path, capsys):
    path = tmp_path / "ledger.sqlite"
    run = Ledger(path).run("a", plan=[Charge(Gaussian(5.0), 4)])
    run.charge(Gaussian(5.0), 3)
    assert main(["audit", str(path), *COMMAND, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["audits"][0]["recorded"] == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"trials": 10}, "trials=10"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"adjacency": "nearby"}, "adjacency='nearby'"),
        (
            {"experiment": lambda present, runs, noise: np.zeros(3), "trials": 200},
            "experiment: returned shape",
        ),
        ({"experiment": lambda present, runs, noise: np.full(runs, np.nan), "trials": 200}, "scores_with"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, named):
    charges = [Charge(Gaussian(4.0))]
    with pytest.raises(ValueError, match=named):
        audit(charges, **{"experiment": experiment_of(charges), **arguments})


@pytest.mark.parametrize(
    "words", [[], ["--attack", "configs/digits_reverse_knn.yaml", "ledger.sqlite"], ["--empirical"]]
)
def test_mistakes_are_one_line(capsys, words):
    assert main(["audit", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
