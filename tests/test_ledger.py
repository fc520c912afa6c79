import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from pl_privknn.privacy.accountant import account
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger, LedgerCorrupt
from pl_privknn.privacy.ledger_books import filter_epsilon, filter_order
from pl_privknn.privacy.mechanisms import Charge, Gaussian, NoisyScreening
from pl_privknn.privacy.report import audit_ledger, epsilon_of_file

G = Gaussian(20.0)
S = NoisyScreening(k=30, threshold=18, sigma=8.0, num_classes=10, sampling_rate=0.2)


def epsilon(*charges, delta=1e-5):
    return account(charges, delta=delta, exact=False).epsilon


def test_plan_is_the_guarantee_and_charges_are_what_was_spent(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    run = ledger.run("a", plan=[Charge(S, 100), Charge(G, 40)])
    assert ledger.report().epsilon == pytest.approx(epsilon(Charge(S, 100), Charge(G, 40)))
    assert ledger.report().epsilon_spent == 0
    first, second = run.charge(S, 60), run.charge(G, 10)
    assert (first, second) == (3, 4)  # after the opening row and the plan
    report = ledger.report()
    assert report.epsilon == pytest.approx(epsilon(Charge(S, 100), Charge(G, 40)))
    assert report.epsilon_spent == pytest.approx(epsilon(Charge(S, 60), Charge(G, 10)))
    run.charge(G, 31)  # one beyond the plan, no budget: the guarantee grows
    assert ledger.report().epsilon == pytest.approx(epsilon(Charge(S, 100), Charge(G, 41)))
    assert run.num_charges == 3


def test_runs_compose_and_each_can_be_seen_alone(tmp_path):
    one, two = Ledger(tmp_path / "l.sqlite"), Ledger(tmp_path / "l.sqlite")
    a, b = one.run("a", plan=[Charge(G, 40)]), two.run("b", plan=[Charge(G, 60)])
    a.charge(G, 40)
    b.charge(G, 10)
    assert one.report().epsilon == two.report().epsilon == pytest.approx(epsilon(Charge(G, 100)))
    assert one.report().epsilon_spent == pytest.approx(epsilon(Charge(G, 50)))
    assert b.report().epsilon == pytest.approx(epsilon(Charge(G, 60)))
    assert one.runs == ["a", "b"]


def test_budget_refuses_plans_and_charges_before_anything_is_written(tmp_path):
    budget = epsilon(Charge(G, 40)) * 1.0001
    ledger = Ledger(tmp_path / "l.sqlite", max_epsilon=budget)
    with pytest.raises(BudgetExceeded, match="max_epsilon"):
        ledger.run("a", plan=[Charge(G, 41)])
    run = ledger.run("a", plan=[Charge(G, 40)])
    run.charge(G, 40)
    rows = ledger.report().rows
    with pytest.raises(BudgetExceeded, match="nothing was drawn"):
        run.charge(G, 1)
    with pytest.raises(BudgetExceeded):
        ledger.run("b", plan=[Charge(Gaussian(1e3), 1)])  # however small: the filter is at its end
    assert ledger.report().rows == rows


def test_later_plans_are_kept_by_a_renyi_filter_at_one_order(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite", max_epsilon=1.0)
    assert ledger.report().filter["rule"] == "one plan"
    ledger.run("a", plan=[Charge(G, 10)])
    ledger.run("b", plan=[Charge(G, 10)])
    used = ledger.report().filter
    assert used["rule"] == "renyi filter"
    order = used["order"]
    # Closed form: 20 Gaussian releases at order α, improved conversion.
    closed = (
        20 * order / (2 * 400) + math.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)
    )
    assert used["epsilon"] == pytest.approx(closed)
    # It never admits more than the accountant's RDP total, whose minimum runs over all orders.
    assert used["epsilon"] >= account([Charge(G, 20)], delta=1e-5, exact=False).epsilon_rdp * (1 - 1e-6)
    count = 0
    while filter_epsilon([Charge(G, 21 + count)], order, 1e-5, "add_remove") <= 1.0:
        ledger.run(f"c{count}", plan=[Charge(G, 1)])
        count += 1
    with pytest.raises(BudgetExceeded, match="filter"):
        ledger.run("last", plan=[Charge(G, 1)])
    assert count > 0


def test_filter_order_is_the_best_for_a_gaussian_that_spends_the_budget():
    order = filter_order(1.0, 1e-5)

    def conversion(alpha):
        return math.log1p(-1 / alpha) - (math.log(1e-5) + math.log(alpha)) / (alpha - 1)

    rho = (1.0 - conversion(order)) / order
    values = [alpha * rho + conversion(alpha) for alpha in (order * 0.9, order, order * 1.1)]
    assert values[1] == pytest.approx(1.0)
    assert min(values) == values[1]


def test_same_plan_continues_and_another_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.run("a", plan=[Charge(G, 10)])
    rows = ledger.report().rows
    ledger.run("a", plan=[Charge(G, 4), Charge(G, 6)])
    assert ledger.report().rows == rows
    for other in ([Charge(G, 11)], [Charge(G, 9)], []):
        with pytest.raises(ValueError, match="another plan"):
            ledger.run("a", plan=other)
    with pytest.raises(ValueError, match="another plan"):
        ledger.run("a", plan=[Charge(G, 9)], extend=True)
    ledger.run("a", plan=[Charge(G, 11)], extend=True)
    assert ledger.report().epsilon == pytest.approx(epsilon(Charge(G, 11)))


def test_adjacency_and_budget_of_a_ledger_stay(tmp_path):
    path = tmp_path / "l.sqlite"
    Ledger(path, max_epsilon=1.0)
    with pytest.raises(ValueError, match="adjacency='replace_one'"):
        Ledger(path, adjacency="replace_one", max_epsilon=1.0)
    with pytest.raises(ValueError, match="max_epsilon=2"):
        Ledger(path, max_epsilon=2.0)
    with pytest.raises(ValueError, match=r"delta=0\.001"):
        Ledger(path, delta=1e-3, max_epsilon=1.0)
    changed = Ledger(path, max_epsilon=2.0, allow_budget_change=True)
    assert changed.max_epsilon == 2.0
    kinds = [json.loads(row[0])["kind"] for row in sqlite3.connect(path).execute("SELECT body FROM rows")]
    assert kinds == ["open", "budget"]


def _filled(path):
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(G, 50)])
    for count in (10, 20, 15):
        run.charge(G, count)
    ledger.close()
    return ledger


def _tamper(path, *statements):
    with sqlite3.connect(path) as db:
        db.execute("DROP TRIGGER rows_are_final")
        db.execute("DROP TRIGGER rows_stay")
        for statement in statements:
            db.execute(statement)


@pytest.mark.parametrize(
    "statements",
    [
        ["""UPDATE rows SET body = replace(body, '"count":20', '"count":2') WHERE position = 4"""],
        ["""UPDATE rows SET body = replace(body, '"max_epsilon":null', '"max_epsilon":9')"""],
        ["DELETE FROM rows WHERE position = 3"],
        [
            "DELETE FROM rows WHERE position = 3",
            "UPDATE rows SET position = position - 1 WHERE position > 3",
        ],
        ["DELETE FROM rows WHERE position = 5"],
        [
            "UPDATE rows SET position = 99 WHERE position = 3",
            "UPDATE rows SET position = 3 WHERE position = 4",
            "UPDATE rows SET position = 4 WHERE position = 99",
        ],
        ["DELETE FROM head"],
        ["UPDATE head SET position = 4"],
    ],
)
def test_every_change_is_found_and_nothing_is_repaired(tmp_path, statements):
    path = tmp_path / "l.sqlite"
    _filled(path)
    assert audit_ledger(path)["rows"] == 5
    _tamper(path, *statements)
    before = path.read_bytes()
    with pytest.raises(LedgerCorrupt):
        audit_ledger(path)
    with pytest.raises(LedgerCorrupt):
        Ledger(path)
    assert path.read_bytes() == before


def test_triggers_and_foreign_files(tmp_path):
    path = tmp_path / "l.sqlite"
    _filled(path)
    for statement in ("UPDATE rows SET body = 'x' WHERE position = 3", "DELETE FROM rows"):
        with sqlite3.connect(path) as db, pytest.raises(sqlite3.DatabaseError):
            db.execute(statement)
    path.write_bytes(b"SQLite format 3\x00" + os.urandom(4000))
    with pytest.raises(LedgerCorrupt):
        audit_ledger(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    for opener in (Ledger, audit_ledger):
        with pytest.raises(LedgerCorrupt, match="not a ledger"):
            opener(other)


def test_a_head_noted_earlier_finds_a_rewritten_ledger(tmp_path):
    _filled(tmp_path / "a.sqlite")
    head = audit_ledger(tmp_path / "a.sqlite")["head"]
    Ledger(tmp_path / "a.sqlite").run("a", plan=[Charge(G, 50)]).charge(G, 5)
    assert audit_ledger(tmp_path / "a.sqlite", head=head)["rows"] == 6
    _filled(tmp_path / "b.sqlite")
    with pytest.raises(LedgerCorrupt, match="rewritten"):
        audit_ledger(tmp_path / "b.sqlite", head=head)


def test_report_of_files(tmp_path):
    path = tmp_path / "l.sqlite"
    _filled(path)
    report = epsilon_of_file(path, 1e-5)
    assert report["epsilon"] == pytest.approx(epsilon(Charge(G, 50)))
    assert report["epsilon_spent"] == pytest.approx(epsilon(Charge(G, 45)))
    assert set(report["runs"]) == {"a"}
    assert epsilon_of_file(path, 1e-3)["epsilon"] < report["epsilon"]
    with pytest.raises(ValueError, match="replace_one"):
        epsilon_of_file(path, 1e-5, adjacency="replace_one")
    records = tmp_path / "r.json"
    records.write_text(json.dumps([Charge(G, 45).to_record()]))
    assert epsilon_of_file(records, 1e-5)["epsilon"] == pytest.approx(report["epsilon_spent"])
    with pytest.raises(FileNotFoundError):
        audit_ledger(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


def test_readonly_folder(tmp_path):
    folder = tmp_path / "ro"
    _filled(folder / "l.sqlite")
    (folder / "l.sqlite.lock").unlink(missing_ok=True)
    before = sorted(path.name for path in folder.iterdir())
    (folder / "l.sqlite").chmod(0o444)
    folder.chmod(0o555)
    try:
        assert audit_ledger(folder / "l.sqlite")["rows"] == 5
        assert sorted(path.name for path in folder.iterdir()) == before
    finally:
        folder.chmod(0o755)


CHILD = """
import sys
from pl_privknn.privacy.ledger import Ledger, BudgetExceeded
from pl_privknn.privacy.mechanisms import Gaussian
path, name, budget = sys.argv[1], sys.argv[2], float(sys.argv[3])
run = Ledger(path, max_epsilon=budget or None).run(name)
print("ready", flush=True)
while True:
    try:
        run.charge(Gaussian(20.0), 1)
    except BudgetExceeded:
        break
    print("drew", flush=True)  # stands for the draw: only after the charge
"""


def _child(path, name, budget):
    command = [sys.executable, "-c", CHILD, str(path), name, str(budget)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.25])
def test_sigkill_never_loses_a_charge(tmp_path, seconds):
    path = tmp_path / "l.sqlite"
    child = _child(path, "a", 0)
    assert child.stdout.readline() == "ready\n"
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    drew = child.communicate()[0].splitlines().count("drew")
    ledger = Ledger(path)
    charged = sum(charge.count for charge in ledger._books.spent())
    assert drew <= charged <= drew + 1
    assert audit_ledger(path)["rows"] == charged + 1
    ledger.run("b").charge(G)  # and it can be used again


def test_processes_together_do_not_pass_the_budget(tmp_path):
    path = tmp_path / "l.sqlite"
    children = [_child(path, name, 0.7) for name in "abc"]
    drew = sum(child.communicate()[0].splitlines().count("drew") for child in children)
    report = Ledger(path, max_epsilon=0.7).report()
    assert report.filter["epsilon"] <= 0.7
    assert drew == sum(charge.count for charge in Ledger(path, max_epsilon=0.7)._books.spent()) > 5
    assert filter_epsilon([Charge(G, drew + 1)], report.filter["order"], 1e-5, "add_remove") > 0.7


def test_no_bad_count_is_charged(tmp_path):
    run = Ledger(tmp_path / "l.sqlite").run("a")
    for count in (0, -1, 1.5):
        with pytest.raises(ValueError, match="count"):
            run.charge(G, count)
    with pytest.raises(ValueError, match="run_id"):
        Ledger(tmp_path / "l.sqlite").run("")
    assert run.num_charges == 0
