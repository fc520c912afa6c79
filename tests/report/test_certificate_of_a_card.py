"""The certificate beside a privacy card."""

import json
import math
import runpy
import sys
from pathlib import Path

from pl_privknn.privacy import Budget, Charge, Gaussian, Laplace, Ledger, ShuffleAmplification
from pl_privknn.privacy.mechanisms import NoNoise
from pl_privknn.report import privacy_card, write_report

CHECKER = Path(__file__).parents[2] / "examples" / "check_certificate.py"


def ledger(folder, *charges, **settings):
    made = Ledger(folder / "ledger.sqlite", Budget(**settings))
    made.run("first", plan=list(charges))
    made.close()
    return folder / "ledger.sqlite"


def test_a_report_has_a_certificate_beside_its_card(tmp_path, monkeypatch, capsys):
    path = ledger(tmp_path, Charge(Gaussian(sigma=4.0)), Charge(Laplace(scale=50.0), 3))
    write_report(path)
    card = json.loads((tmp_path / "privacy_card.json").read_text())
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path / "certificate.json")])
    runpy.run_path(str(CHECKER), run_name="__main__")
    assert "follows at delta" in capsys.readouterr().out
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert card["epsilon"] <= certificate["epsilon"] <= card["epsilon"] * 1.001
    assert "| certificate | certificate.json proves" in (tmp_path / "privacy_card.md").read_text()


def test_a_card_says_where_there_is_no_certificate(tmp_path):
    (tmp_path / "certificate.json").write_text("an older one")
    write_report(ledger(tmp_path, Charge(ShuffleAmplification(1.0, 1000)), adjacency="replace_one"))
    assert not (tmp_path / "certificate.json").exists()
    assert "no certificate covers it" in (tmp_path / "privacy_card.md").read_text()


def refused(name):
    raise AssertionError(f"{name} is no JSON")


def test_an_infinite_epsilon_is_a_string_in_the_file_of_a_card(tmp_path):
    path = ledger(tmp_path, Charge(NoNoise()))
    write_report(path)
    card = json.loads((tmp_path / "privacy_card.json").read_text(), parse_constant=refused)
    assert (card["epsilon"], card["guarantee"]) == ("inf", "none")
    assert privacy_card(path)["epsilon"] == math.inf


def test_a_release_with_hardly_any_noise_has_a_report(tmp_path):
    path = ledger(tmp_path, Charge(Gaussian(sigma=1e-200)))
    assert "ε = ∞" in write_report(path).read_text(encoding="utf-8")
