"""The unit of privacy travels with ledgers, lists, summaries and cards, and two units are never composed."""

import json

import pytest
import torch

from pl_privknn.cli import main
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE
from pl_privknn.labelers.base import Labeler, check_protects
from pl_privknn.privacy import Budget
from pl_privknn.privacy.card import card_markdown, card_of
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.records import check_owners, records_drawn
from pl_privknn.privacy.verify import audit_ledger, check_summary, epsilon_of_files, export_ledger
from pl_privknn.report.facts import facts_of
from tests.privacy.ledger.ledger_setup import PROTECTED, G
from tests.setup.small_fit import fit_student


@pytest.fixture
def ledgers(tmp_path):
    """The path of a ledger for each unit, with the same charge."""
    paths = {}
    for unit in ("record", "person"):
        paths[unit] = tmp_path / f"{unit}.sqlite"
        ledger = Ledger(paths[unit], Budget(unit=unit))
        ledger.run("a", plan=[Charge(G, 5)]).charge(G, 5, **PROTECTED, unit=unit)
        ledger.close()
    return paths


@pytest.mark.parametrize(("unit", "other"), [("record", "person"), ("person", "record")])
def test_a_ledger_keeps_to_one_unit(ledgers, unit, other):
    ledger = Ledger(ledgers[unit], Budget(unit=unit))
    with pytest.raises(ValueError, match="units are never composed") as refused:
        ledger.run("a").charge(G, 1, **PROTECTED, unit=other)
    assert "\n" not in str(refused.value)
    assert ledger.run("a").num_charges == 1
    ledger.close()
    with pytest.raises(ValueError, match=f"unit='{other}', but the ledger .* was opened with unit='{unit}'"):
        Ledger(ledgers[unit], Budget(unit=other))
    reopened = Ledger.open_readonly(ledgers[unit])
    assert reopened.budget.unit == unit
    assert reopened.report().guarantee.unit == unit
    assert reopened.report().guarantee.guarantee == "unconditional"


def test_the_unit_changes_no_figure_and_is_in_every_one(ledgers, capsys):
    audits = {unit: audit_ledger(path, exact=False) for unit, path in ledgers.items()}
    assert audits["record"]["epsilon"] == audits["person"]["epsilon"]
    for unit, path in ledgers.items():
        assert audits[unit]["unit"] == export_ledger(path)["unit"] == unit
        card = card_of(facts_of(path, exact=False))
        assert card["unit"] == unit
        assert f"one {unit} of the private set" in card_markdown(card)
        assert any("several records of one person" in text for text in card["known_exclusions"]) == (
            unit == "record"
        )
        assert main(["epsilon", str(path), "--fast", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["unit"] == unit
    assert main(["audit", str(ledgers["record"]), "--unit", "person"]) != 0
    assert "unit='person'" in capsys.readouterr().err
    assert main(["audit", str(ledgers["person"]), "--unit", "person"]) == 0


def test_files_of_two_units_have_no_total(ledgers, tmp_path):
    records = [Charge(G, 5).to_record()]
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(records))
    exported = tmp_path / "person.json"
    exported.write_text(json.dumps(export_ledger(ledgers["person"])))
    for files in ([*ledgers.values()], [ledgers["record"], exported], [ledgers["person"], bare]):
        with pytest.raises(ValueError, match="never composed"):
            epsilon_of_files(files, 1e-5, exact=False)
    both = epsilon_of_files([ledgers["person"], bare], 1e-5, exact=False, unit="person")
    assert both["unit"] == "person"
    with pytest.raises(ValueError, match="unit"):
        epsilon_of_files([exported], 1e-5, exact=False, unit="record")


def test_a_summary_of_another_unit_is_found_out(ledgers):
    audit = audit_ledger(ledgers["person"], exact=False)
    summary = {name: audit[name] for name in ("epsilon", "delta", "adjacency", "unit", "guarantee")}
    summary |= {
        "epsilon_spent": audit["epsilon_spent"],
        "ledger_head": audit["ledger_head"],
        "max_epsilon": None,
    }

    def disagreeing(stated):
        found = check_summary(stated, ledgers["person"], exact=False)
        return [check["name"] for check in found if check["agrees"] is False]

    assert disagreeing(summary) == []
    assert disagreeing(summary | {"unit": "record"}) == ["unit"]
    assert disagreeing({name: value for name, value in summary.items() if name != "unit"}) == ["unit"]


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_run_states_its_unit(tmp_path, unit):
    teacher, owners = PATE(5, noise=Gaussian(2.0), progress=False), torch.arange(300) // 6
    callback, _ = fit_student(tmp_path, teacher, 0.1, owners=owners, queries_per_round=20, unit=unit)
    assert callback.privacy_summary()["unit"] == callback.ledger.budget.unit == unit
    assert teacher.records.unit == unit


def test_persons_need_owners_and_a_teacher_that_protects_them(tmp_path):
    def fit(owners, teacher=None):
        teacher = teacher or PATE(5, noise=Gaussian(2.0), progress=False)
        fit_student(tmp_path, teacher, 0.1, owners=owners, queries_per_round=20, unit="person")

    with pytest.raises(ValueError, match="private records have no owners"):
        fit(None)
    with pytest.raises(ValueError, match="no owner"):
        fit(torch.arange(300) - 1)
    with pytest.raises(ValueError, match="unit='person': RecordsAlone"):
        fit(torch.arange(300), RecordsAlone())
    assert not list(tmp_path.glob("run/run.sqlite"))


class RecordsAlone(Labeler):
    """A teacher that knows nothing of persons."""

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        return []

    def answer(self, queries, run, max_answers):
        raise AssertionError


def test_a_teacher_without_owners_charges_for_records(tmp_path):
    teacher = PATE(5, noise=Gaussian(2.0), progress=False)
    generator = torch.Generator().manual_seed(0)
    teacher.fit(PrivateRecords.of(torch.randn(60, 3, generator=generator), torch.arange(60) % 2, 2))
    run = Ledger(tmp_path / "person.sqlite", Budget(unit="person")).run("a")
    with pytest.raises(ValueError, match="units are never composed"):
        teacher.label(torch.zeros(2, 3), run)
    assert run.num_charges == 0
    check_protects(teacher, "person")


def test_owners_are_whole_numbers_of_each_record():
    assert check_owners(torch.tensor([3, 0]), 2).tolist() == [3, 0]
    for bad in (None, torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match=r"own|private_groups"):
            check_owners(bad, 2)


def test_each_of_a_persons_records_is_drawn_equally_often():
    # 1,000 draws of 2 among 5: each is there in 2/5 of them; 5 standard deviations, an error rate of 1e-5.
    owners, noise = torch.tensor([7, 2, 7, 7, 9, 7, 7]), SeededNoise(3)
    counts = torch.zeros(7)
    for _ in range(1000):
        drawn = records_drawn(owners, 2, noise)
        assert owners[drawn].sort().values.tolist() == [2, 7, 7, 9]
        counts[drawn] += 1
    assert counts[[1, 4]].tolist() == [1000, 1000]
    assert (counts[owners == 7] - 400).abs().max() < 5 * (1000 * 0.4 * 0.6) ** 0.5
