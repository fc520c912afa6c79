"""The ledger's file: what is found out, and what reading it leaves."""

import contextlib
import hashlib
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.sqlite_file import RowStore
from pl_privknn.privacy.verify import audit_ledger
from tests.privacy.ledger.ledger_setup import PROTECTED, G, charged, fill

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
    assert all("version" in body for body in bodies)
    assert {body["kind"] for body in bodies if "time" in body} == {"open", "plan"}
    assert {body["time"][-6:] for body in bodies if "time" in body} == {"+00:00"}
    assert bodies[1]["plan"] == [Charge(G, 50).to_record()]
    assert bodies[2]["charge"] == Charge(G, 10).to_record()
    assert bodies[2]["run"] == "a"


TAMPERINGS = {
    "count": ["""UPDATE rows SET body = replace(body, '"count":20', '"count":2') WHERE position = 4"""],
    "budget": ["""UPDATE rows SET body = replace(body, '"epsilon":null', '"epsilon":9')"""],
    "time": ["""UPDATE rows SET body = replace(body, '"time":"2', '"time":"3') WHERE position = 2"""],
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
    noise = bytes(range(100, 200)) * 40  # random bytes would once in 128 runs look like write-ahead logging
    for broken in (b"", whole[: len(whole) // 2], b"SQLite format 3\x00" + noise, b"hello"):
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


SWALLOWING = {
    "row": "CREATE TRIGGER swallow BEFORE INSERT ON rows BEGIN SELECT RAISE(IGNORE); END",
    "head": "CREATE TRIGGER swallow BEFORE UPDATE ON head BEGIN SELECT RAISE(IGNORE); END",
}


@pytest.mark.parametrize("what", SWALLOWING)
def test_a_ledger_that_swallows_charges_is_refused(path, what):
    fill(path)
    run = Ledger(path).run("a")
    with sqlite3.connect(path) as db:
        db.execute(SWALLOWING[what])
    with pytest.raises(LedgerCorrupt, match="lost rows that were written to it"):
        run.charge(G)
    with pytest.raises(LedgerCorrupt, match="holds the trigger 'swallow', which no ledger has"):
        Ledger(path)
    with sqlite3.connect(path) as db:
        db.execute("DROP TRIGGER swallow")
    assert charged(path) == 45


SIGMA_1 = {"mechanism": "gaussian", "sigma": 1}


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("refund", {}, "row 6"),
        (
            "open",
            {"adjacency": "add_remove", "delta": 1e-5, "epsilon": None, "filter_order": 2.0},
            "row 6",
        ),
        ("charge", {}, "row 6"),
        ("charge", {"charge": {**SIGMA_1, "sigma": -1, "count": 1}}, "row 6"),
        ("charge", {"charge": {**SIGMA_1, "count": -5}}, "row 6"),
        ("charge", {"charge": {**SIGMA_1, "extra": 1}}, "row 6"),
        ("charge", {"charge": {"mechanism": "of my own", "count": 1}}, "import that first"),
    ],
)
def test_well_sealed_rows_that_no_ledger_writes_are_refused(path, kind, fields, told):
    fill(path)
    store = RowStore(path)
    with store.writing():
        store.append({"kind": kind, "run": "a", **fields})
    for opener in (audit_ledger, Ledger):
        with pytest.raises(LedgerCorrupt if told == "row 6" else ValueError, match=told):
            opener(path)


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


def test_a_link_that_leads_nowhere_is_not_replaced_by_a_new_ledger(path, tmp_path):
    link, target = tmp_path / "link.sqlite", tmp_path / "share" / "ledger.sqlite"
    link.symlink_to(target)
    with pytest.raises(FileNotFoundError, match=r"link to .*share.*mount what it leads to"):
        Ledger(link)
    assert link.is_symlink()
    assert not target.parent.exists()
    target.parent.mkdir()
    Ledger(target).run("a").charge(G, **PROTECTED)
    assert charged(link) == 1


def test_a_ledger_that_another_program_writes_ahead_is_refused(tmp_path):
    path, copied = tmp_path / "ledger.sqlite", tmp_path / "copied.sqlite"
    open_run = Ledger(path).run("a")
    open_run.charge(G, **PROTECTED)

    def mode(wanted):
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(f"PRAGMA journal_mode={wanted}")

    mode("WAL")
    shutil.copy(path, copied)
    for act in (
        lambda: open_run.charge(G, **PROTECTED),
        lambda: Ledger(path),
        lambda: Ledger.open_readonly(path),
        lambda: Ledger(copied),
        lambda: audit_ledger(copied, exact=False),
    ):
        with pytest.raises(LedgerCorrupt, match=r"write-ahead logging.*PRAGMA journal_mode=DELETE"):
            act()
    open_run.ledger.close()
    mode("DELETE")  # the remedy
    Ledger(path).run("a").charge(G, **PROTECTED)
    assert charged(path) == 2


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
