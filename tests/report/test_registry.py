"""The entry for the registry of deployments, and the certificate beside a privacy card."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from pl_privknn.privacy import Charge, Gaussian, Laplace, Ledger, ShuffleAmplification
from pl_privknn.report import privacy_card, write_report
from pl_privknn.report.registry import check_entry, registry_entry

CHECKER = Path(__file__).parents[2] / "examples" / "check_certificate.py"


def ledger(folder, *charges, **settings):
    made = Ledger(folder / "ledger.sqlite", **settings)
    made.run("first", plan=list(charges))
    made.close()
    return folder / "ledger.sqlite"


def test_a_report_has_an_entry_and_a_certificate_beside_its_card(tmp_path, monkeypatch, capsys):
    path = ledger(tmp_path, Charge(Gaussian(sigma=4.0)), Charge(Laplace(scale=50.0), 3))
    write_report(path)
    card = json.loads((tmp_path / "privacy_card.json").read_text())
    entry = yaml.safe_load((tmp_path / "registry.yaml").read_text())
    check_entry(entry)
    assert entry["deployment"]["privacy_loss"]["privacy_parameters"] == {
        "epsilon": card["epsilon"],
        "delta": card["delta"],
    }
    assert entry["deployment"]["deployment_model"]["model_name"] == "Central"
    assert "laplace, 3 releases at most" in entry["deployment"]["implementation"]["mechanisms"]
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
    entry = yaml.safe_load((tmp_path / "registry.yaml").read_text())
    assert entry["deployment"]["deployment_model"]["model_name"] == "Shuffle"


def test_what_is_no_entry_of_the_registry_is_refused(tmp_path):
    entry = registry_entry(privacy_card(ledger(tmp_path, Charge(Gaussian(sigma=4.0)))))
    for path, value, named in [
        (("deployment", "basic", "name"), None, "lacks deployment.basic.name"),
        (("deployment", "basic", "colour"), "red", "deployment.basic.colour is no field"),
        (("deployment", "basic", "publication_date"), "1/1/2026", "isoformat"),
        (("deployment", "deployment_model", "model_name"), "Global", "model_name='Global' must be one of"),
        (
            ("deployment", "privacy_loss", "privacy_parameters", "epsilon"),
            "1",
            "epsilon='1' must be a number",
        ),
        (("deployment", "privacy_loss", "privacy_unit"), 3, "privacy_unit=3 must be text"),
    ]:
        changed = json.loads(json.dumps(entry))
        place = changed
        for name in path[:-1]:
            place = place[name]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        with pytest.raises(ValueError, match=named):
            check_entry(changed)
