"""The word beside ε never gets stronger, and ε never smaller, whatever doors a ledger's charges pass."""

import itertools
import json

import pytest

from pl_privknn.labelers import PrivateKNN
from pl_privknn.labelers.base import stated_plan
from pl_privknn.privacy.accounting.accountant import account, merge_charges, read_records
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Conditional, Gaussian, Laplace
from pl_privknn.privacy.mechanisms.base import LEVELS, Guarantee, guarantee_rank, noise_guarantee, weakest
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.privacy.verify import audit_ledger, epsilon_of_file, epsilon_of_files, export_ledger

PLAIN = [Gaussian(20.0), Laplace(40.0)]
WITH_CONDITION = Conditional(Gaussian(20.0), "the parts stayed as they were")


def test_guarantees_compose_to_the_weakest_with_all_reasons():
    values = [
        Guarantee(),
        Guarantee("conditional", ("a",)),
        Guarantee("conditional", ("b", "a")),
        Guarantee("none", ("c",)),
    ]
    for first, second, third in itertools.product(values, repeat=3):
        both = first & second
        assert LEVELS.index(both.level) == max(LEVELS.index(first.level), LEVELS.index(second.level))
        assert set(both.reasons) == {*first.reasons, *second.reasons}
        assert (first & second) & third == first & (second & third)
        assert first & first == first & Guarantee() == first
        assert weakest([first, second, third]).level == (both & third).level
    assert [guarantee_rank(level) for level in LEVELS] == [2, 1, 0]


def test_a_guarantee_has_reasons_that_fit_it():
    wrong = [
        ("certain", ("a",)),
        ("unconditional", ("a",)),
        ("conditional", ()),
        ("none", "abc"),
        ("none", ("",)),
    ]
    for level, reasons in wrong:
        with pytest.raises(ValueError, match=r"guarantee=|reasons="):
            Guarantee(level, reasons)


def test_a_marked_charge_keeps_its_mark_in_records_sums_and_reports():
    mark = noise_guarantee(SeededNoise(0))
    charge = Charge(Gaussian(20.0), 3).with_guarantee(mark)
    assert Charge.from_record(json.loads(json.dumps(charge.to_record()))) == charge
    assert "guarantee" not in Charge(Gaussian(20.0), 3).to_record()
    (both,) = merge_charges([Charge(Gaussian(20.0), 2), charge])
    assert (both.count, both.guarantee) == (5, mark)
    report = account([charge, Charge(WITH_CONDITION, 1)], delta=1e-5, exact=False)
    assert report.guarantee == "none"
    assert "seed" in report.reason
    assert "the parts stayed" in report.reason
    plain = account([Charge(Gaussian(20.0), 3)], delta=1e-5, exact=False)
    assert (plain.guarantee, plain.reason) == ("unconditional", "")
    assert plain.epsilon == account([charge], delta=1e-5, exact=False).epsilon


def ledger_of(path, mechanism, noise):
    """A ledger with a planned release and a second one, of the plan or beyond it."""
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(PLAIN[0], 6)])
    for released in (PLAIN[0], mechanism):
        run.charge(released, 3, **({"noise": noise, "adjacencies": ("add_remove",)} if noise else {}))
    ledger.close()


def through_export(path, target):
    target.write_text(json.dumps(export_ledger(path)))


def through_a_list(path, target):
    report = epsilon_of_file(path, exact=False)
    target.write_text(json.dumps([record for run in report["runs"].values() for record in run["guaranteed"]]))


def through_another_ledger(path, target):
    if path.suffix == ".sqlite":
        records = export_ledger(path)["releases"]
    else:
        content = json.loads(path.read_text())
        records = content["releases"] if isinstance(content, dict) else content
    Ledger(target).run("taken over", plan=read_records(records)).ledger.close()


DOORS = [(through_export, ".json"), (through_a_list, ".json"), (through_another_ledger, ".sqlite")]
#: A second release, the noise of both, and the strongest word beside their ε.
WORDS = [
    (PLAIN[0], SystemNoise(), "unconditional"),
    (PLAIN[1], SystemNoise(), "conditional"),  # which was chosen in view of answers
    (WITH_CONDITION, SystemNoise(), "conditional"),
    (PLAIN[0], None, "conditional"),
    (WITH_CONDITION, SeededNoise(1), "none"),
]


@pytest.mark.parametrize(("mechanism", "noise", "strongest"), WORDS)
def test_no_chain_of_doors_raises_a_guarantee_or_lowers_epsilon(tmp_path, mechanism, noise, strongest):
    path = tmp_path / "0.sqlite"
    ledger_of(path, mechanism, noise)
    report = epsilon_of_file(path, exact=False)
    assert report["guarantee"] == strongest
    level, epsilon = LEVELS.index(strongest), report["epsilon"]
    audit = audit_ledger(path, exact=False)
    assert all(audit[name] == report[name] for name in ("guarantee", "reason", "epsilon"))
    assert bool(report["reason"]) == (level > 0)
    for number, (door, suffix) in enumerate(DOORS):
        target, last = tmp_path / f"door {number}{suffix}", tmp_path / f"last {number}.sqlite"
        door(path, target)
        through_another_ledger(target, last)
        for passed in (epsilon_of_file(one, 1e-5, exact=False) for one in (target, last)):
            assert LEVELS.index(passed["guarantee"]) >= level, door
            assert passed["epsilon"] >= epsilon * (1 - 1e-9), door
    other = tmp_path / "other.json"
    other.write_text(json.dumps([Charge(Gaussian(50.0), 1).to_record()]))
    together = epsilon_of_files([last, other], 1e-5, exact=False)
    assert LEVELS.index(together["guarantee"]) >= max(level, 1)
    assert together["epsilon"] >= epsilon * (1 - 1e-9)


def test_plans_say_what_their_noise_leaves_of_them():
    for source, expected in ((SeededNoise(3), "none"), (SystemNoise(), "unconditional")):
        teacher = PrivateKNN(k=5, sampling_rate=0.5, noise=Gaussian(3.0), noise_source=source)
        plan = stated_plan(teacher, 10, 10, 3)
        assert account(plan, delta=1e-5, exact=False).guarantee == expected
