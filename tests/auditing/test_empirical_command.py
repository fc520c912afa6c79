"""Bounds of the empirical audit, audits of whole lists, and the command; seeds are fixed."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from pl_privknn.auditing import audit, audit_records
from pl_privknn.auditing.bounds import (
    epsilon_lower_bound,
    lower_probability,
    mu_lower_bound,
    upper_probability,
)
from pl_privknn.auditing.releases import experiment_of
from pl_privknn.cli.main import main
from pl_privknn.privacy.accounting.pld import gaussian_epsilon
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian, GaussianDPStream, Laplace
from pl_privknn.privacy.noise import SeededNoise

ROOT2 = math.sqrt(2.0)


# --- bounds


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (3, 50), (50, 50), (4000, 10_000)])
def test_clopper_pearson_is_scipys(hits, trials):
    interval = stats.binomtest(hits, trials).proportion_ci(0.98, method="exact")
    assert lower_probability(hits, trials, 0.01) == pytest.approx(interval.low, abs=1e-12)
    assert upper_probability(hits, trials, 0.01) == pytest.approx(interval.high, abs=1e-12)


@pytest.mark.parametrize("bound", [epsilon_lower_bound, mu_lower_bound])
def test_lower_bounds_err_no_more_often_than_stated(bound):
    rng = np.random.default_rng(0)
    mu, delta, repeats = 1.0, 1e-2, 400
    true = gaussian_epsilon(mu, delta)
    above = sum(
        bound(rng.normal(mu, 1, 400), rng.normal(0, 1, 400), delta=delta, confidence=0.8) > true
        for _ in range(repeats)
    )
    # At most 0.2 of them may lie above; a count this large has probability below 1e-3 even at 0.2.
    assert above <= stats.binom.isf(1e-3, repeats, 0.2)
    if bound is mu_lower_bound:
        assert above > 0  # the bound is close enough to the truth to miss it sometimes


# --- lists of records, and the command


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
