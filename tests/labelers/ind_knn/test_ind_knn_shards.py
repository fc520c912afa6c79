"""Ind-KNN whose records lie in shards: the answers and payments of one process, and nobody's budget twice."""

import shutil

import numpy as np
import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.ind_knn import PublicDensity
from pl_privknn.labelers.ind_knn.algorithm import IndKNNEngine
from pl_privknn.neighbors.hashing import SignProjections
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.private_state import PrivateStoreError
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_setup import (
    ALL,
    LABELS,
    NUMBERS,
    QUERIES,
    ROWS,
    SETTINGS,
    C,
    Silent,
    Together,
    amounts,
    rows,
)
from tests.labelers.ind_knn.ind_knn_setup import teacher as any_teacher
from tests.neighbors.shard_setup import by_row, in_order, parts_of
from tests.setup.refusals import refusals

COUNT, BUDGET = 60, 0.4
PARTS = parts_of(COUNT)
OTHERS = {
    "cosine": {},
    "rbf": {"kernel": "rbf", "bandwidth": 1.0},
    "earlier answers": {"reuse": True, "abstain": 0.1},
    "density": {"density": PublicDensity(10, COUNT)},
    "hashing": {"hashing": SignProjections(3, 2)},
    "numbers": {"ids": np.arange(COUNT) * 7 - 30},
}


def table(count=COUNT):
    """Every record three times, so that equal ones lie in different shards."""
    features, labels = rows(count // 3, seed=1)
    return features.repeat(3, 1), labels.repeat(3)


def teacher(**settings):
    given = {"rho": BUDGET, "noise_source": SeededNoise(3), "soft": True, "release_counts": True}
    return any_teacher(**{**SETTINGS, **given, **settings})


THREE = in_order(5, 4, 3)


@pytest.mark.parametrize(
    ("parts", "settings"), [(parts, "cosine") for parts in PARTS] + [("unequal", other) for other in OTHERS]
)
def test_answers_and_payments_are_those_of_one_process(parts, settings):
    features, labels = table()
    queries = torch.cat([QUERIES, rows(30, seed=5)[0]])
    alone, ledgers = teacher(**OTHERS[settings]), [FreeLedger(), FreeLedger()]
    alone.fit(PrivateRecords.of(features, labels, C))
    expected = alone.label(queries, ledgers[0])
    shards = Together(lambda: teacher(**OTHERS[settings]), PARTS[parts], features, labels, ledgers[1]).fit()
    found = shards.ask(queries)
    assert torch.equal(found.labels, expected.labels)
    # A product in float32 depends in its last digits on the table that the row stands in.
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.probabilities, expected.probabilities, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(shards.left(), alone.remaining(), rtol=1e-5, atol=1e-5)
    assert (shards.left() < alone.parameters.count_cost).any(), "budgets must run out"
    assert ledgers[0].rows == ledgers[1].rows
    # A count, votes, and that the budgets are written.
    for member in shards.members:
        assert member.records.processes.sent == 8 * len(queries) * (1 + C) + 4
    again = Together(lambda: teacher(**OTHERS[settings]), PARTS[parts], features, labels).fit().ask(queries)
    assert torch.equal(again.scores, found.scores)


@pytest.mark.parametrize("folder", ["on disk", None])
def test_the_last_query_of_each_call_is_paid_for(tmp_path, folder):
    """Also where it is the only one, and in what the shards have written."""

    def make():
        return teacher(noise_source=Silent(0))

    run, place = Ledger(tmp_path / "ledger.sqlite").run("run"), folder and tmp_path / "state"
    alone, shards = make(), Together(make, THREE, ROWS, LABELS, run, place).fit()
    alone.fit(PrivateRecords.of(ROWS, LABELS, C))
    for queries in (QUERIES[:1], QUERIES[1:4], QUERIES[4:5], QUERIES[5:]):
        before = shards.left()
        alone.label(queries, FreeLedger())
        shards.ask(queries)
        np.testing.assert_allclose(shards.left(), alone.remaining(), rtol=1e-5, atol=1e-9)
        for member, (_, _, places) in zip(shards.members, THREE, strict=True):
            engine = member._engine
            written = dict(engine.budgets.read("SELECT id, allowed - spent FROM budgets"))
            noted = np.array([written[i] for i in engine.owners.tolist()]) * engine.parameters.quantum
            np.testing.assert_array_equal(noted, shards.left()[places])
            assert (noted < before[places]).any()


# ---------------------------------------------------------------------------- a run, and what it must not forget


def started(folder, parts=THREE, places=ALL, numbers=NUMBERS, name="run", fit=True, **settings):
    """The processes of a run; the same one, if it was started before."""
    ledger = Ledger(folder / "ledger.sqlite")
    shards = Together(
        lambda: teacher(noise_source=Silent(0), **settings), parts, ROWS[places], LABELS[places],
        ledger.run(name, []), folder / "run.private" / name,
    )  # fmt: skip
    return shards.fit(None if numbers is None else numbers[places]) if fit else shards


@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["digests", "numbers"])
def test_every_shard_keeps_its_own_budgets_and_a_resumed_run_goes_on_with_them(tmp_path, numbers):
    whole = started(tmp_path / "whole", numbers=numbers)
    whole.ask(QUERIES[:6])
    expected = whole.ask(QUERIES[6:])
    run = started(tmp_path / "run", numbers=numbers)
    run.ask(QUERIES[:6])
    place, before = tmp_path / "run" / "run.private" / "run", run.left()
    run.close()
    for rank, count in enumerate((5, 4, 3)):
        own = place / f"shard-{rank:05d}" if rank else place
        assert own.stat().st_mode & 0o777 == 0o700
        assert len(amounts(own, run.members[0].parameters)) == count
    run = started(tmp_path / "run", numbers=numbers)
    np.testing.assert_array_equal(run.left(), before)
    found = run.ask(QUERIES[6:])
    torch.testing.assert_close(found.scores, expected.scores)
    np.testing.assert_allclose(run.left(), whole.left(), rtol=1e-6)
    assert run.run.num_charges == 1


def refused(message, folder, error=PrivateStoreError, **how):
    with pytest.raises(error, match=message) as caught:
        started(folder, **how)
    assert "\n" not in str(caught.value)


def test_other_numbers_of_shards_and_budgets_that_are_not_there_are_refused_by_name(tmp_path):
    started(tmp_path).ask()
    place = tmp_path / "run.private" / "run"
    for counts in ((5, 7), (5, 4, 2, 1), (12,)):
        words = rf"run holds the budgets of shard 0 of 3, and this is shard 0 of {len(counts)}"
        refused(words, tmp_path, parts=in_order(*counts))
    whole = teacher(noise_source=Silent(0))
    with pytest.raises(PrivateStoreError, match=words):
        whole.join_run(place, whole.paying(Ledger(tmp_path / "ledger.sqlite").run("run")))
    with pytest.raises(PrivateStoreError, match=r"shard-00001 holds the budgets of shard 1 of 3"):
        teacher(state_dir=place / "shard-00001").fit(PrivateRecords.of(ROWS, LABELS, C))

    one, two = place / "shard-00001", place / "shard-00002"
    one.rename(place / "aside")
    refused(r"shard-00001: the budgets of this shard are missing; put them back", tmp_path)
    two.rename(one)
    moved = "shard-00001 holds the budgets of shard 2 of 3, and this is shard 1 of 3"
    refused(f"{moved}|shard-00002: the budgets of this shard are missing", tmp_path)  # whichever comes first
    one.rename(place / "kept")
    (place / "aside").rename(one)
    other = started(tmp_path / "other")
    other.ask()
    other.close()
    (tmp_path / "other" / "run.private" / "run" / "shard-00002").rename(two)
    refused(r"shard-00002 holds the budgets of stream \w+, and this is stream \w+", tmp_path)
    shutil.rmtree(two)
    (place / "kept").rename(two)
    np.testing.assert_array_less(started(tmp_path).left(), BUDGET + 1)


@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["digests", "numbers"])
@pytest.mark.parametrize(
    "parts", [in_order(4, 5, 3), in_order(5, 4, 3)[::-1], by_row(12, 3)], ids=["borders", "order", "rows"]
)
def test_records_that_moved_to_another_shard_are_refused(tmp_path, numbers, parts):
    """Where they come, a second budget would be waiting for them."""
    started(tmp_path, numbers=numbers).ask(QUERIES[:2])
    refused(
        r"private records: (some|shard \d of 3)", tmp_path, ValueError, numbers=numbers,
        parts=[(first, stride, rows) for first, stride, rows in parts],
    )  # fmt: skip


@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["digests", "numbers"])
def test_records_neither_come_nor_go_once_something_was_answered(tmp_path, numbers):
    started(tmp_path, numbers=numbers).close()  # nothing was asked: there may be others
    started(tmp_path, parts=in_order(4, 4, 3), places=ALL[:11], numbers=numbers).ask(QUERIES[:2])
    refused(r"private records: ", tmp_path, ValueError, numbers=numbers)
    fewer = {"parts": in_order(4, 4, 2), "places": ALL[:10], "numbers": numbers}
    refused(r"shard 2 of 3 must hold those with which the stream began", tmp_path, ValueError, **fewer)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_shard_that_dies_lets_nothing_out_and_gives_nothing_back(tmp_path, monkeypatch, rank):
    run = started(tmp_path)
    start, pay = run.left(), IndKNNEngine.pay

    def dying(engine, mark):
        pay(engine, mark)
        if engine is run.members[rank]._engine:
            raise RuntimeError("another process of this training ended")
        return mark

    with monkeypatch.context() as patch:
        patch.setattr(IndKNNEngine, "pay", dying)
        with pytest.raises(RuntimeError, match="another process"):
            run.ask()
    spent = run.left()
    assert (spent < start).any()
    assert run.run.noted(run.members[0]._budgets.topic) is None
    run.close()
    resumed = started(tmp_path).left()
    written = np.concatenate([THREE[shard][2] for shard in range(rank + 1)])
    np.testing.assert_array_equal(resumed[written], spent[written])
    assert (resumed <= start).all()


def test_what_one_shard_has_spent_holds_all_of_them_to_their_records(tmp_path):
    """A process that died before it wrote anything knows of no query; a record that comes to it may have spent."""
    run = started(tmp_path)
    run.members[2]._budgets.close()
    with pytest.raises(PrivateStoreError):
        run.ask()
    run.close()
    resumed = started(tmp_path, fit=False)
    first, _, last = (
        member._budgets.calls for member in resumed.members
    )  # the second one may have ended before
    assert (first, last) == (1, 0)
    assert all(member._budgets.begun for member in resumed.members)
    resumed.close()
    # Record 0, which shard 0 has charged, is now the last one's.
    moved = {"places": [*ALL[1:], 0], "parts": in_order(4, 4, 4)}
    refused(r"private records: ", tmp_path, ValueError, **moved)


def three(**settings):
    return Together(lambda: teacher(**settings), THREE, ROWS, LABELS)


test_shards_say_what_they_miss = refusals(
    {
        "budgets of shards are opened together; call join_run": lambda: three(state_dir="state").fit(),
        "ids: shape and numbers must be those of the records": lambda: three(ids=NUMBERS[:11]).fit(),
    }
)
