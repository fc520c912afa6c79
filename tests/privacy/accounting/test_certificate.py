"""Certificates of ε, and the script that checks them without this package."""

import copy
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference

from pl_privknn.cli.main import main
from pl_privknn.privacy import Charge, account, certify, epsilon_lower
from pl_privknn.privacy.accounting.certificate import digest
from pl_privknn.privacy.mechanisms import (
    Conditional,
    ExponentialArgmax,
    Gaussian,
    GaussianDPStream,
    Laplace,
    NegativeBinomial,
    NoisyScreening,
    PureDP,
    RandomizedResponse,
    ShuffleAmplification,
)

CHECKER = Path(__file__).parents[3] / "examples" / "check_certificate.py"
SCREENING = NoisyScreening(k=60, threshold=30, sigma=15.0, num_classes=5, sampling_rate=0.5)
PLANS = {
    "gaussian": [Charge(Gaussian(sigma=20.0), 300), Charge(GaussianDPStream(0.2))],
    "laplace": [Charge(Laplace(scale=20.0, sampling_rate=0.3), 50), Charge(Gaussian(sigma=8.0))],
    "randomized response": [Charge(RandomizedResponse(0.3, num_values=2, differing=2), 2)],
    "negative binomial": [Charge(NegativeBinomial(shape=50.0, ratio=0.9, moved=2), 3)],
    "argmax": [Charge(ExponentialArgmax(scale=20.0, votes="swap", sampling_rate=0.5), 60)],
    "screening": [Charge(SCREENING, 50), Charge(Gaussian(sigma=9.0, sampling_rate=0.5), 40)],
    "two families": [Charge(SCREENING, 30), Charge(ExponentialArgmax(scale=15.0, votes="add"), 20)],
    "conditional": [Charge(Conditional(Laplace(scale=4.0), "a condition"), 2)],
    "nothing": [],
}


def run_checker(document, path, capsys, monkeypatch):
    """Globals of the checker after it took ``document``; SystemExit where it refuses."""
    path.write_text(json.dumps(document))
    monkeypatch.setattr(sys, "argv", ["check_certificate.py", str(path)])
    found = runpy.run_path(str(CHECKER), run_name="__main__")
    return found, capsys.readouterr().out


@pytest.mark.parametrize("name", PLANS)
def test_the_checker_takes_it_and_it_lies_just_above_the_stated_epsilon(name, tmp_path, capsys, monkeypatch):
    adjacency = "replace_one" if name == "negative binomial" else "add_remove"
    document = certify(PLANS[name], delta=1e-5, adjacency=adjacency)
    _, said = run_checker(document, tmp_path / "c.json", capsys, monkeypatch)
    stated = account(PLANS[name], delta=1e-5, adjacency=adjacency).epsilon
    assert f"epsilon {document['epsilon']:.9g} follows at delta 1e-05" in said
    assert document["epsilon_stated"] == stated
    assert epsilon_lower(PLANS[name], delta=1e-5, adjacency=adjacency) <= document["epsilon"]
    assert document["epsilon"] <= stated * (1 + 1e-3)
    assert document["guarantee"] == ("conditional" if name == "conditional" else "unconditional")


def test_profiles_of_the_checker_agree_with_dp_accounting(tmp_path, capsys, monkeypatch):
    found, _ = run_checker(certify([], delta=1e-5), tmp_path / "c.json", capsys, monkeypatch)
    s = np.exp(np.array([0.0, 0.05, 0.1, 0.3, 0.7]))
    fine = {"value_discretization_interval": 1e-4}
    pairs = [
        (Gaussian(2.0, sampling_rate=0.2), reference.from_gaussian_mechanism(2.0, sampling_prob=0.2, **fine)),
        (Laplace(2.0, sampling_rate=0.2), reference.from_laplace_mechanism(2.0, sampling_prob=0.2, **fine)),
        (Laplace(2.0), reference.from_laplace_mechanism(2.0, **fine)),
        (PureDP(np.log(3.0)), reference.from_randomized_response(0.5, 2, **fine)),
    ]
    for mechanism, distribution in pairs:
        ways = [found["profile"](mechanism.to_record(), s, way) for way in (1, -1)]
        want = [distribution.get_delta_for_epsilon(float(e)) for e in np.log(s)]
        assert np.max(ways, axis=0).astype(float) == pytest.approx(want, abs=5e-5)


def changed(document, path, change):
    document = copy.deepcopy(document)
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = change(place[path[-1]])
    return document


def refuses(document, tmp_path, capsys, monkeypatch):
    try:
        run_checker(document, tmp_path / "c.json", capsys, monkeypatch)
    except (SystemExit, Exception):
        return True
    return False


def sealed(document):
    return {**document, "digest": digest(document)}


def test_a_witness_that_proves_less_is_refused_though_its_digest_fits(tmp_path, capsys, monkeypatch):
    document = certify(PLANS["screening"], delta=1e-5)
    family = document["parts"][0]
    masses = family["pairs"][0]["masses"]
    largest = int(np.argmax(masses))
    values = family["values"]["steps"]
    last = str(max(map(int, values)))
    middle = int(np.argmax(values[last]))
    tail = int(np.argmax(np.array(values[last]) > 1e-9))
    less = lambda share: lambda x: int(x * share) if isinstance(x, int) else x * share  # noqa: E731
    attempts = {
        "ε": (("epsilon",), less(1 - 1e-4)),
        "δ": (("delta",), less(1 - 1e-4)),
        "composed δ": (("composed", 0), less(1 - 1e-4)),
        "noise": (("charges", 0, "sigma"), less(0.99)),
        "more releases": (("charges", 1, "count"), lambda n: n + 1),
        "fewer pairs": (("parts", 1, "pairs", 0, "count"), lambda n: n - 1),
        "pairs of no whole number": (("parts", 1, "pairs", 0, "count"), lambda n: n - 0.5),
        "a mass": (("parts", 0, "pairs", 0, "masses", largest), less(0.99)),
        "a place": (("parts", 1, "pairs", 0, "first"), lambda n: n - 1),
        "the last value function": (("parts", 0, "values", "steps", last, middle), less(1 - 1e-6)),
        "its tail": (("parts", 0, "values", "steps", last, tail), less(0.9)),
        "the block's size": (("parts", 0, "pairs", 0, "size"), lambda n: n - 1),
        "a window that leaves losses out": (("windows", 0, 2), lambda n: n // 64),
        "a tilt downwards": (("windows", 0, 0), lambda tilt: -tilt),
        "the grid": (("step",), less(0.5)),
        "NaN": (("parts", 0, "values", "steps", last, middle), lambda x: float("nan")),
    }  # fmt: skip
    # A number that is changed without a new digest is refused, too.
    assert refuses(changed(document, *attempts["ε"]), tmp_path, capsys, monkeypatch)
    for name, (path, change) in attempts.items():
        assert refuses(sealed(changed(document, path, change)), tmp_path, capsys, monkeypatch), name
    assert not refuses(document, tmp_path, capsys, monkeypatch)


def test_two_families_in_blocks_are_refused(tmp_path, capsys, monkeypatch):
    plans = PLANS["two families"]
    both = [certify([plan, Charge(Gaussian(sigma=500.0))], delta=1e-5) for plan in plans]
    document = certify(plans, delta=1e-5)
    parts = [next(part for part in one["parts"] if "values" in part) for one in both]
    assert refuses(sealed({**document, "parts": parts}), tmp_path, capsys, monkeypatch)


def test_a_mechanism_that_the_checker_does_not_know_has_no_certificate():
    with pytest.raises(ValueError, match="'shuffle_amplification': no certificate covers it"):
        certify([Charge(ShuffleAmplification(1.0, 1000))], delta=1e-5, adjacency="replace_one")


def test_the_command_writes_certificates_of_records_and_configurations(tmp_path, capsys, monkeypatch):
    records, config = tmp_path / "records.json", CHECKER.parents[1] / "configs" / "digits_reverse_knn.yaml"
    records.write_text(json.dumps([charge.to_record() for charge in PLANS["laplace"]]))
    for file, options in ((records, ["--delta", "1e-5"]), (config, [])):
        out = tmp_path / "certificate.json"
        assert main(["epsilon", str(file), *options, "--certificate", str(out), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        document = json.loads(out.read_text())
        assert report["epsilon"] == document["epsilon_stated"] <= report["epsilon_certificate"]
        run_checker(document, out, capsys, monkeypatch)


def test_the_checker_stands_alone():
    assert "pl_privknn" not in CHECKER.read_text()
