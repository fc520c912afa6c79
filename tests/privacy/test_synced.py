"""What was paid for is forced to the disk, so that a power failure does not take it back."""

import os

import pytest

from pl_privknn.privacy.files import replaced_durably, write_durably
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.private_state import PrivateStore
from tests.privacy.ledger.ledger_setup import G

#: SQLite's level that syncs the file with each commit and the journal's folder too.
EXTRA = 3


@pytest.fixture
def synced(monkeypatch):
    """Sizes of the files that are synced, by inode, as they were at the time."""
    sizes = {}

    def watched(name):
        original = getattr(os, name)

        def sync(descriptor):
            original(descriptor)
            found = os.fstat(descriptor)
            sizes[found.st_ino] = found.st_size

        monkeypatch.setattr(os, name, sync)

    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            watched(name)
    return sizes


def test_a_replaced_file_is_synced_before_it_takes_its_place(tmp_path, synced):
    path = tmp_path / "file"
    for content in (b"first", b"a longer second"):
        write_durably(path, content)
        assert path.read_bytes() == content
        assert synced[path.stat().st_ino] == len(content)
    assert tmp_path.stat().st_ino in synced or os.name != "posix"


def test_a_file_that_could_not_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    write_durably(path, "old")
    with pytest.raises(TypeError), replaced_durably(path) as file:
        file.write("text where bytes are wanted")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "old")]


def test_ledgers_and_stores_sync_every_commit(tmp_path):
    private = PrivateStore(tmp_path / "private.sqlite")
    assert private.read("PRAGMA synchronous").fetchone() == (EXTRA,)
    ledger = Ledger(tmp_path / "run.sqlite")
    ledger.run("a").charge(G)
    assert ledger._store._db.execute("PRAGMA synchronous").fetchone() == (EXTRA,)
    beside = Ledger(tmp_path / "run.sqlite", run_file=tmp_path / "file.sqlite").file
    for part in ("main", "run"):
        assert beside.read(f"PRAGMA {part}.synchronous").fetchone() == (EXTRA,)
