"""The ledger's file under several processes at once; kills are in test_ledger_disk.py."""

import contextlib
import multiprocessing
import threading

from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.accountant import RenyiFilter
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from tests.privacy.ledger.ledger_setup import PROTECTED, G, charged, needs_fork


def _together(count, task):
    """Results of ``task(index)`` in ``count`` processes that start at the same moment."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(count), context.Queue()

    def child(index):
        barrier.wait(60)
        results.put(task(index))

    processes = [context.Process(target=child, args=(index,)) for index in range(count)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    return found


@needs_fork
def test_processes_together_do_not_pass_the_budget(path):
    def draw(index):
        run, drew = Ledger(path, Budget(epsilon=0.7)).run("abc"[index]), 0
        with contextlib.suppress(BudgetExceeded):
            while True:
                run.charge(G)
                drew += 1
        return drew

    drew = sum(_together(3, draw))
    ledger = Ledger.open_readonly(path)
    gate = RenyiFilter(ledger.report().filter["order"], 1e-5, "add_remove")
    assert drew == charged(path) > 5
    # The last one that fits was admitted, one more would not fit.
    assert gate.epsilon([Charge(G, drew)]) <= 0.7 < gate.epsilon([Charge(G, drew + 1)])
    assert ledger.within_budget()


@needs_fork
def test_of_plans_stated_at_once_only_those_that_fit_pass(path):
    Ledger(path, Budget(epsilon=0.6))

    def state(index):
        with contextlib.suppress(BudgetExceeded):
            return bool(Ledger(path, Budget(epsilon=0.6)).run(f"run {index}", plan=[Charge(G, 6)]))

    passed = [bool(done) for done in _together(5, state)]
    report = Ledger.open_readonly(path).report()
    assert 0 < sum(passed) < 5
    assert report.guaranteed == (Charge(G, 6 * sum(passed)),)
    assert report.epsilon <= 0.6


@needs_fork
def test_five_processes_charge_one_planned_run(path):
    Ledger(path).run("a", plan=[Charge(G, 30)])

    def pay(index):
        run = Ledger(path).run("a", plan=[Charge(G, 30)])
        return [run.charge(G, **PROTECTED) for _ in range(6)]

    positions = [position for found in _together(5, pay) for position in found]
    assert sorted(positions) == list(range(3, 33))  # each row is one process's
    report = Ledger(path).report()
    assert report.guaranteed == report.charged == (Charge(G, 30),)
    assert report.filter["rule"] == "composition"


@needs_fork
def test_a_handle_survives_a_fork(path):
    run = Ledger(path).run("a")
    run.charge(G)
    assert len(_together(2, lambda index: run.charge(G))) == 2
    run.charge(G)
    assert charged(path) == run.num_charges == 4


def test_threads_share_a_handle(path):
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(G, 15)])
    threads = [threading.Thread(target=lambda: [run.charge(G) for _ in range(5)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert ledger.report().rows <= 17
    for thread in threads:
        thread.join()
    assert charged(path) == run.num_charges == 15
