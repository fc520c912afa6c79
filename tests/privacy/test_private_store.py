"""The private store: durable, for the owner alone, one writer, one place."""

import contextlib
import copy
import os
import pickle
import shutil
import sqlite3
import stat

import pytest

from pl_privknn.privacy.private_state import PrivateStore, PrivateStoreError
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_child, is_killed, talking

SCHEMA = "CREATE TABLE things (number INTEGER PRIMARY KEY, content BLOB CHECK (length(content) < 1000000));"
SECRET = b"its bytes occur nowhere else " * 9


def opened(path):
    return PrivateStore(path, SCHEMA)


def add(store, *numbers, content=b"x"):
    with store.writing() as db:
        db.executemany("INSERT INTO things VALUES (?, ?)", [(number, content) for number in numbers])


def numbers(store):
    return [number for (number,) in store.read("SELECT number FROM things ORDER BY number")]


def refusal(path):
    try:
        opened(path).close()
    except PrivateStoreError as error:
        return str(error)


@pytest.mark.parametrize("folder", ["made/for/it", None])
def test_what_was_written_is_found_and_half_of_it_never(tmp_path, folder):
    path = None if folder is None else tmp_path / folder / "store"
    store = opened(path)
    add(store, 1, 2)
    store.note("color", ["blue", 1])

    def breaks_off():
        with store.writing():
            add(store, 3)
            raise KeyError

    with pytest.raises(KeyError):
        breaks_off()
    with pytest.raises(PrivateStoreError, match="constraint failed"):
        add(store, 4, 2)
    assert (numbers(store), store.fact("color"), store.fact("size", 7)) == ([1, 2], ["blue", 1], 7)
    if path is None:
        return
    name = store.name
    store.close()
    with contextlib.closing(opened(path)) as again:
        assert (numbers(again), again.fact("color"), again.name) == ([1, 2], ["blue", 1], name)
    for place in (path, *list(path.parents)[:3]):
        assert stat.S_IMODE(place.stat().st_mode) & 0o77 == 0
    with contextlib.closing(opened(tmp_path / "other")) as other:
        assert other.name != name


def test_every_commit_is_synced_and_what_is_deleted_is_overwritten(tmp_path):
    store = opened(tmp_path / "store")
    assert store.read("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
    add(store, 1, content=SECRET)
    assert SECRET in (tmp_path / "store").read_bytes()
    with store.writing() as db:
        db.execute("DELETE FROM things")
    assert not any(SECRET[:40] in path.read_bytes() for path in tmp_path.iterdir())


@needs_fork
@pytest.mark.parametrize("moment", ["within", "after"])
def test_a_killed_writer_leaves_all_of_a_change_or_nothing(tmp_path, moment):
    opened(tmp_path / "store").close()

    def dies():
        store = opened(tmp_path / "store")
        add(store, 1)
        with store.writing():
            add(store, *range(2, 20_000), content=SECRET)
            if moment == "within":
                os.kill(os.getpid(), 9)
        os.kill(os.getpid(), 9)

    assert is_killed(dies)
    with contextlib.closing(opened(tmp_path / "store")) as store:  # the lock went with the process
        assert numbers(store) == ([1] if moment == "within" else list(range(1, 20_000)))
        add(store, 0)


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "store"
    store = opened(path)
    (tmp_path / "link").symlink_to(path)
    for place in (path, tmp_path / "link"):
        assert "in use; close the process or object" in refusal(place)
    with talking(lambda say: say(refusal(path))) as (_, lines):
        assert "in use" in lines.read()
    store.close()
    store.close()
    with pytest.raises(PrivateStoreError, match="is closed; open it again"):
        add(store, 1)
    assert refusal(path) is None


@needs_fork
def test_a_forked_child_can_not_write_and_does_not_unlock(tmp_path):
    store = opened(tmp_path / "store")

    def child():
        with pytest.raises(PrivateStoreError, match="opened by another process"):
            add(store, 1)
        store.close()

    assert in_child(child) == 0
    assert "in use" in refusal(tmp_path / "store")
    add(store, 2)
    assert numbers(store) == [2]


def test_it_is_not_copied():
    for clone in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            clone(opened(None))


def test_damage_is_refused(tmp_path):
    path = tmp_path / "store"
    with contextlib.closing(opened(path)) as store:
        add(store, *range(500), content=SECRET)
    data = path.read_bytes()
    foreign = tmp_path / "foreign"
    sqlite3.connect(foreign).execute("CREATE TABLE a (b)").connection.close()
    for wrong in (b"", b"hello, this is no store", data[: len(data) // 2], data[:4096], foreign.read_bytes()):
        path.write_bytes(wrong)
        assert "put back an undamaged copy" in refusal(path)
    path.write_bytes(data)
    assert refusal(path) is None


def test_a_copy_is_refused_while_the_original_is_there(tmp_path):
    place = tmp_path / "first" / "store"
    opened(place).close()
    shutil.copytree(place.parent, tmp_path / "copy")
    assert "copy is a copy of" in refusal(tmp_path / "copy" / "store")
    with contextlib.closing(opened(place)):  # also while it is open
        assert "each would spend the same budgets" in refusal(tmp_path / "copy" / "store")
    place.parent.rename(tmp_path / "moved")
    assert refusal(tmp_path / "moved" / "store") is None
    assert "copy is a copy of" not in (refusal(tmp_path / "copy" / "store") or "")


def test_a_store_in_memory_moves_to_a_file_as_a_whole(tmp_path, monkeypatch):
    store = opened(None)
    add(store, 1)
    path = tmp_path / "new" / "store"

    def move():
        with store.copied_to(path) as db:
            db.execute("INSERT INTO things VALUES (2, 'y')")

    def full(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(PrivateStoreError, match="No space left on device"):
            move()
    assert not path.exists()
    move()
    with contextlib.closing(opened(path)) as there:
        assert (numbers(there), numbers(store), there.name) == ([1, 2], [1], store.name)


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrivateStoreError, match=r"file/sub.*can't be made|file.*can't be"):
        opened(tmp_path / "file" / "sub" / "store")
