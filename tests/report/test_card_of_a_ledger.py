"""The privacy card of a ledger with hardly any noise, or none."""

import json
import math

from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger
from pl_privknn.privacy.mechanisms import NoNoise
from pl_privknn.report import privacy_card, write_report


def ledger(folder, *charges, **settings):
    made = Ledger(folder / "run.sqlite", Budget(**settings))
    made.run("first", plan=list(charges))
    made.close()
    return folder / "run.sqlite"


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
