"""The entry for the registry of deployments, and the certificate beside a privacy card."""

import datetime
import json
import runpy
import sys
from pathlib import Path

import yaml

from pl_privknn.privacy import Charge, Gaussian, Laplace, Ledger, ShuffleAmplification
from pl_privknn.report import write_report

CHECKER = Path(__file__).parents[2] / "examples" / "check_certificate.py"


# The registry's schema: fields of each object, those that are required with a star; values that a field may take.
FIELDS = {
    "": "url_slug* deployment*",
    "deployment": "basic* dp_variant privacy_loss deployment_model implementation administrative*",
    "deployment.basic": "name* data_curators* description* intended_use* data_product_type* data_product_region* "
    "publication_date* data_product_sector",
    "deployment.dp_variant": "variant_name data_domain unprotected_quantities",
    "deployment.privacy_loss": "privacy_unit privacy_unit_details number_of_privacy_units privacy_parameters "
    "privacy_parameters_details",
    "deployment.privacy_loss.privacy_parameters": "epsilon delta rho",
    "deployment.deployment_model": "model_name model_name_details trust_assumptions actors release_type "
    "release_type_details data_source_type data_source_type_details access_type access_type_details",
    "deployment.implementation": "preprocessing_and_hyperparameter_tuning mechanisms composition post_processing "
    "justification utility additional_information",
    "deployment.administrative": "evidence_sources* status* registry_authors* tier*",
}
CHOICES = {
    "deployment.basic.data_product_type": "Summary statistics|Machine learning model|Dataset|Synthetic data",
    "deployment.dp_variant.variant_name": "Pure DP|Approximate DP|Zero-concentrated DP|Renyi DP|Custom",
    "deployment.deployment_model.model_name": "Local|Central|Shuffle|Federated|Varies",
    "deployment.deployment_model.release_type": "One release|Many releases",
    "deployment.deployment_model.data_source_type": "Static|Dynamic",
    "deployment.deployment_model.access_type": "Interactive|Non-interactive",
    "deployment.administrative.status": "Draft|Pending|Changes Required|Approved",
    "deployment.administrative.tier": "1|2|3",
}
NUMBERS = ("epsilon", "delta", "rho", "number_of_privacy_units", "tier")


def check_entry(entry, path=""):
    """The entry follows the registry's schema."""
    fields = FIELDS[path].split()
    known = {name.rstrip("*") for name in fields}
    assert {name[:-1] for name in fields if name.endswith("*")} <= set(entry) <= known, path
    for name, value in entry.items():
        place = f"{path}.{name}".lstrip(".")
        assert place not in CHOICES or str(value) in CHOICES[place].split("|"), place
        if place in FIELDS:
            check_entry(value, place)
        elif name in NUMBERS:
            assert isinstance(value, int | float), place
        elif name not in ("data_curators", "registry_authors", "evidence_sources"):
            assert isinstance(value, str), place


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
    datetime.date.fromisoformat(entry["deployment"]["basic"]["publication_date"])
    stated = {"epsilon": card["epsilon"], "delta": card["delta"]}
    assert entry["deployment"]["privacy_loss"]["privacy_parameters"] == stated
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
    check_entry(entry)
    assert entry["deployment"]["deployment_model"]["model_name"] == "Shuffle"
