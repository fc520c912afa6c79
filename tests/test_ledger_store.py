"""The ledger's file: what is found out, what survives a kill, what several processes do to it."""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from pl_privknn.privacy.ledger import BudgetExceeded, Ledger, LedgerCorrupt
from pl_privknn.privacy.ledger_store import RowStore
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.renyi_filter import RenyiFilter
from pl_privknn.privacy.report import audit_ledger

G = Gaussian(20.0)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def fill(path):
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(G, 50)])
    for count in (10, 20, 15):
        run.charge(G, count)
    ledger.close()


def charged(path):
    ledger = Ledger.open_readonly(path)
    return sum(charge.count for charge in ledger.report().charged)


# ------------------------------------------------------------------ the chain


def test_rows_hold_what_is_documented_and_the_chain_is_sha256(path):
    fill(path)
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT position, body, hash FROM rows ORDER BY position").fetchall()
        head = db.execute("SELECT position, hash FROM head").fetchall()
    sealed = "0" * 64
    for place, (position, body, stored) in enumerate(rows, start=1):
        sealed = hashlib.sha256((sealed + "\n" + body).encode()).hexdigest()
        assert (position, stored) == (place, sealed)
        assert body == json.dumps(json.loads(body), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert head == [(5, sealed)]
    bodies = [json.loads(body) for _, body, _ in rows]
    assert [body["kind"] for body in bodies] == ["open", "plan", "charge", "charge", "charge"]
    assert all({"time", "version"} <= set(body) for body in bodies)
    assert {body["time"][-6:] for body in bodies} == {"+00:00"}
    assert bodies[1]["plan"] == [Charge(G, 50).to_record()]
    assert bodies[2]["charge"] == Charge(G, 10).to_record()
    assert bodies[2]["run"] == "a"


TAMPERINGS = {
    "count": ["""UPDATE rows SET body = replace(body, '"count":20', '"count":2') WHERE position = 4"""],
    "budget": ["""UPDATE rows SET body = replace(body, '"max_epsilon":null', '"max_epsilon":9')"""],
    "time": ["""UPDATE rows SET body = replace(body, '"time":"2', '"time":"3') WHERE position = 5"""],
    "hash": ["UPDATE rows SET hash = 'x' WHERE position = 3"],
    "deleted": ["DELETE FROM rows WHERE position = 3"],
    "closed gap": [
        "DELETE FROM rows WHERE position = 3",
        "UPDATE rows SET position = position - 1 WHERE position > 3",
    ],
    "cut tail": ["DELETE FROM rows WHERE position = 5"],
    "cut tail and head": ["DELETE FROM rows WHERE position = 5", "UPDATE head SET position = 4"],
    "all but the first": ["DELETE FROM rows WHERE position > 1"],
    "swapped": [
        "UPDATE rows SET position = 99 WHERE position = 3",
        "UPDATE rows SET position = 3 WHERE position = 4",
        "UPDATE rows SET position = 4 WHERE position = 99",
    ],
    "added": ["INSERT INTO rows SELECT 6, body, hash FROM rows WHERE position = 5"],
    "added before": ["INSERT INTO rows SELECT 0, body, hash FROM rows WHERE position = 5"],
    "no head": ["DELETE FROM head"],
    "emptied": ["DELETE FROM rows"],
    "dropped": ["DROP TABLE rows"],
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_every_change_is_found_and_nothing_is_repaired(path, name):
    fill(path)
    assert audit_ledger(path)["rows"] == 5
    watching = Ledger.open_readonly(path)
    with sqlite3.connect(path) as db:
        for statement in TAMPERINGS[name]:
            assert db.execute(statement).rowcount != 0
    before = path.read_bytes()
    for opener in (audit_ledger, Ledger, Ledger.open_readonly):
        with pytest.raises(LedgerCorrupt, match=r"ledger\.sqlite"):
            opener(path)
    # One that is open looks at new rows only, and at the head.
    if "head" in name or name == "dropped":
        with pytest.raises((LedgerCorrupt, OSError)):
            watching.report()
    assert path.read_bytes() == before


def test_truncated_overwritten_and_foreign_files_are_refused(path, tmp_path):
    fill(path)
    whole = path.read_bytes()
    for broken in (
        b"",
        whole[: len(whole) // 2],
        b"SQLite format 3\x00" + os.urandom(4000),
        b"hello",
    ):
        path.write_bytes(broken)
        for opener in (Ledger, Ledger.open_readonly, audit_ledger):
            with pytest.raises(LedgerCorrupt):
                opener(path)
        assert path.read_bytes() == broken
    path.write_bytes(b"")
    with pytest.raises(LedgerCorrupt, match="is empty"):  # not taken for a new one
        Ledger(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(LedgerCorrupt, match="not a ledger"):
        Ledger(other)


def test_every_byte_of_the_rows_is_covered(path):
    fill(path)
    whole = bytearray(path.read_bytes())
    rows = [i for word in (b'"kind":"', b'"count":', b'"sigma":', b'"run":"') for i in _find(whole, word)]
    assert len(rows) > 12
    for start in rows:
        broken = bytearray(whole)
        broken[start + 1] ^= 1
        path.write_bytes(broken)
        with pytest.raises(LedgerCorrupt):
            audit_ledger(path)


def _find(text, word):
    start = text.find(word)
    while start >= 0:
        yield start
        start = text.find(word, start + 1)


@pytest.mark.parametrize(
    "forged",
    [
        {"kind": "refund", "run": "a"},
        {"kind": "open", "adjacency": "add_remove", "delta": 1e-5, "max_epsilon": None, "filter_order": 2.0},
        {"kind": "charge", "run": "a"},
        {"kind": "charge", "run": "a", "charge": {"mechanism": "gaussian", "sigma": -1, "count": 1}},
        {"kind": "charge", "run": "a", "charge": {"mechanism": "gaussian", "sigma": 1, "count": -5}},
        {"kind": "charge", "run": "a", "charge": {"mechanism": "gaussian", "sigma": 1, "extra": 1}},
    ],
)
def test_well_sealed_rows_that_no_ledger_writes_are_refused(path, forged):
    fill(path)
    store = RowStore(path)
    with store.writing():
        store.append(forged)
    with pytest.raises(LedgerCorrupt, match="row 6"):
        audit_ledger(path)


def test_mechanism_of_a_package_that_is_not_imported(path):
    fill(path)
    store = RowStore(path)
    with store.writing():
        store.append({"kind": "charge", "run": "a", "charge": {"mechanism": "of my own", "count": 1}})
    with pytest.raises(ValueError, match="import that first"):
        Ledger(path)


def test_file_that_is_moved_or_put_back_while_open(path, tmp_path):
    fill(path)
    old = tmp_path / "old.sqlite"
    shutil.copy(path, old)
    ledger = Ledger(path)
    run = ledger.run("a")
    run.charge(G)
    path.rename(tmp_path / "moved.sqlite")
    with pytest.raises(LedgerCorrupt, match="moved"):
        run.charge(G)
    shutil.copy(old, path)  # another file of that name
    with pytest.raises(LedgerCorrupt, match="replaced"):
        run.charge(G)
    path.write_bytes(b"")
    (tmp_path / "moved.sqlite").replace(path)
    run.charge(G)
    path.write_bytes(old.read_bytes())  # the same file with older content
    with pytest.raises((LedgerCorrupt, OSError)):
        run.charge(G)
    assert audit_ledger(path)["rows"] == 5


def test_full_disk_charges_nothing_and_the_ledger_goes_on(path):
    ledger = Ledger(path)
    run = ledger.run("a", plan=[Charge(G, 10_000)])
    pages = ledger._store._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="Nothing was charged"):
        _charge_until_refused(run)
    paid = run.num_charges
    ledger._store._db.execute(f"PRAGMA max_page_count = {pages + 100}")
    run.charge(G)
    assert charged(path) == run.num_charges == paid + 1


def _charge_until_refused(run):
    for _ in range(200):
        run.charge(G)


# ------------------------------------------------------------------ reading only


def test_reading_leaves_no_trace_and_sees_committed_rows_only(path, tmp_path):
    fill(path)
    Path(f"{path}.lock").unlink(missing_ok=True)
    before = sorted(tmp_path.iterdir())
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO rows VALUES (6, 'x', 'x')")
    ledger = Ledger.open_readonly(path)
    assert ledger.report().rows == audit_ledger(path)["rows"] == 5
    writer.execute("ROLLBACK")
    with pytest.raises(PermissionError, match="reading only"):
        ledger.run("b")
    assert sorted(tmp_path.iterdir()) == before
    Ledger(path).run("a").charge(G, 2)
    assert ledger.report().rows == 6  # an open reader sees what others append
    with pytest.raises(FileNotFoundError):
        Ledger.open_readonly(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


def _unprivileged(task):
    """Run ``task`` as a user whom file permissions bind; returns what it returns, or its exception."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            theirs.send(task())
        except Exception as error:
            theirs.send(error)

    process = context.Process(target=child)
    process.start()
    result = ours.recv() if ours.poll(60) else None
    process.join(60)
    return result


@needs_fork
def test_read_only_folder():
    # Not tmp_path, which only its owner may enter.
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "ledger.sqlite"
        fill(path)
        audit_ledger(path)  # loads everything before the privileges go
        path.chmod(0o444)
        folder.chmod(0o555)
        assert _unprivileged(lambda: audit_ledger(path)["rows"]) == 5
        assert isinstance(_unprivileged(lambda: Ledger(path)), OSError)
        # With a killed writer's journal beside it the file can't be trusted as it is.
        folder.chmod(0o755)
        path.chmod(0o644)
        _leave_a_hot_journal(path)
        path.chmod(0o444)
        Path(f"{path}-journal").chmod(0o444)
        folder.chmod(0o555)
        refused = _unprivileged(lambda: audit_ledger(path))
        assert isinstance(refused, OSError)
        assert "copy both" in str(refused)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def _leave_a_hot_journal(path):
    code = (
        "import os, signal, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1')\n"
        "db.execute('BEGIN IMMEDIATE')\n"
        "db.execute('UPDATE rows SET body = body || hex(zeroblob(3000))')\n"
        "db.executemany('INSERT INTO rows VALUES (?, hex(zeroblob(3000)), 1)', [(n,) for n in range(10, 99)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = path.read_bytes()
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert path.read_bytes() != before  # the unfinished transaction has reached the file
    assert Path(f"{path}-journal").stat().st_size > 0


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills")
def test_transaction_of_a_killed_writer_is_undone(path):
    fill(path)
    _leave_a_hot_journal(path)
    assert audit_ledger(path)["rows"] == 5
    Ledger(path).run("a").charge(G, 5)
    assert charged(path) == 50


# ------------------------------------------------------------------ kills

LOOP = """
import sys
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
run = Ledger(sys.argv[1]).run("a")
print("ready", flush=True)
while True:
    run.charge(Gaussian(20.0), 1)
    print("drew", flush=True)  # stands for the draw: only after the charge
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills")
def test_sigkill_of_a_fresh_interpreter(path):
    child = subprocess.Popen([sys.executable, "-c", LOOP, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    drew = child.communicate()[0].splitlines().count("drew")
    assert drew <= charged(path) <= drew + 1


@needs_fork
def test_sigkill_at_random_moments_never_loses_a_charge(path):
    """Twenty writers of one run, each killed at a random moment, most of them within a commit."""
    moments = random.Random(0)
    context = multiprocessing.get_context("fork")
    drew = 0
    for _ in range(20):
        ours, theirs = os.pipe()

        def child(pipe=theirs):
            run = Ledger(path).run("a")
            while True:
                run.charge(G)
                os.write(pipe, b".")

        process = context.Process(target=child)
        process.start()
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            drew += len(pipe.read())
        if path.exists():  # the first may have been killed before it made the ledger
            paid = charged(path)
            assert drew <= paid
            drew = paid  # the kill may have come between a charge and its draw: budget wasted, not lost
    assert drew > 20
    assert audit_ledger(path)["rows"] == drew + 2


@needs_fork
def test_a_kill_while_the_ledger_is_made_leaves_none_or_a_whole_one(tmp_path):
    moments = random.Random(0)
    context = multiprocessing.get_context("fork")
    seen = set()
    for index in range(25):
        path = tmp_path / str(index) / "ledger.sqlite"
        process = context.Process(target=Ledger, args=(path,))
        process.start()
        time.sleep(moments.uniform(0.0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        seen.add(path.exists())
        if path.exists():
            assert audit_ledger(path)["rows"] == 1
        assert Ledger(path).report().rows == 1
    assert seen  # which of both happens depends on the machine's speed


# ------------------------------------------------------------------ several at once


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
        run = Ledger(path, max_epsilon=0.7).run("abc"[index])
        drew = 0
        try:
            while True:
                run.charge(G)
                drew += 1
        except BudgetExceeded:
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
    Ledger(path, max_epsilon=0.6)

    def state(index):
        try:
            Ledger(path, max_epsilon=0.6).run(f"run {index}", plan=[Charge(G, 6)])
        except BudgetExceeded:
            return False
        return True

    passed = _together(5, state)
    report = Ledger.open_readonly(path).report()
    assert 0 < sum(passed) < 5
    assert report.guaranteed == (Charge(G, 6 * sum(passed)),)
    assert report.epsilon <= 0.6


@needs_fork
def test_several_processes_charge_one_planned_run(path):
    Ledger(path).run("a", plan=[Charge(G, 60)])

    def pay(index):
        run = Ledger(path).run("a", plan=[Charge(G, 60)])
        return [run.charge(G) for _ in range(20)]

    positions = [position for found in _together(3, pay) for position in found]
    assert sorted(positions) == list(range(3, 63))  # each row is one process's
    report = Ledger(path).report()
    assert report.guaranteed == report.charged == (Charge(G, 60),)
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
    run = ledger.run("a", plan=[Charge(G, 40)])
    threads = [threading.Thread(target=lambda: [run.charge(G) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert ledger.report().rows <= 42
    for thread in threads:
        thread.join()
    assert charged(path) == run.num_charges == 40
