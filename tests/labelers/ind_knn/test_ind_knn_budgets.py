"""A record keeps its own budget, wherever it stands in a table and whatever past comes back, or nothing goes on."""

import os
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.ind_knn.algorithm import unit_rows
from pl_privknn.privacy.private_state import FILE_NAME, PrivateStoreError
from tests.labelers.ind_knn.ind_knn_literal import Literal
from tests.labelers.ind_knn.ind_knn_setup import (
    ALL,
    LABELS,
    NUMBERS,
    QUERIES,
    ROWS,
    SETTINGS,
    UNKNOWN,
    C,
    D,
    Stream,
    teacher,
)


@pytest.fixture(params=["digests", "digests of the data module", "numbers"])
def stream(request, tmp_path):
    """A stream in which everything was asked once, by all records."""
    made = Stream(tmp_path, request.param)
    made.fit_places(ALL)
    made.ask()
    yield made
    made.close()


# ---------------------------------------------------------------- who is who


def test_other_features_of_the_same_records(stream):
    left, other = stream.left(ALL), torch.rand(12, 9)
    if stream.kind == "digests":
        with pytest.raises(ValueError, match=UNKNOWN):
            stream.refit(ROWS, LABELS, NUMBERS, other)
        assert stream.left(ALL) == left  # the table before is still there
        other = ROWS.clone()
    stream.refit(ROWS, LABELS, NUMBERS, other)
    assert stream.left(ALL) == left


def test_numbers_that_moved_are_noticed_where_the_data_module_shows_the_records(tmp_path):
    stream, order = Stream(tmp_path, "digests of the data module"), np.roll(ALL, 1)

    def fit(places, numbers):
        stream.settings["ids"] = numbers
        stream.fit(ROWS[places], LABELS[places])

    fit(order, NUMBERS)
    fit(ALL, NUMBERS)  # nothing was asked yet, so the table may be another
    stream.ask()
    left = stream.left(ALL)
    for places, numbers in ((order, NUMBERS), (ALL, NUMBERS + 1000), (ALL[1:], NUMBERS[:-1])):
        with pytest.raises(ValueError, match="come under another number than before"):
            fit(places, numbers)
    fit(order, NUMBERS[order])
    assert stream.left(order.tolist()) == left


@pytest.mark.parametrize("kinds", [("digests", "numbers"), ("numbers", "digests")])
def test_identities_stay_of_one_kind(tmp_path, kinds):
    stream = Stream(tmp_path, kinds[0])
    stream.fit_places(ALL)
    stream.ask()
    stream.kind = kinds[1]
    with pytest.raises(ValueError, match=r"budgets belong to (digests|numbers) of records, and now come"):
        stream.fit_places(ALL)


def test_numbers_of_the_data_module_and_of_a_file(tmp_path):
    stream = Stream(tmp_path)
    np.save(tmp_path / "ids.npy", NUMBERS)
    for places, ids in ((ALL[::-1], None), (ALL, tmp_path / "ids.npy")):
        stream.close()
        stream.labeler = teacher(**stream.settings, ids=ids)
        given = torch.from_numpy(NUMBERS[places].copy())
        stream.labeler.fit(PrivateRecords.of(torch.rand(12, D), LABELS[places], C, ids=given))
        stream.ask()
        np.testing.assert_array_equal(stream.labeler._engine.ids, NUMBERS[places])
    with pytest.raises(ValueError, match="ids: shape"):
        stream.labeler.fit(PrivateRecords.of(ROWS[:11], LABELS[:11], C))


# ---------------------------------------------------------------- a past that comes back


def test_an_older_copy_or_a_lost_state_is_refused(stream):
    file = stream.state / FILE_NAME
    copies = [file.read_bytes()]
    for _ in range(2):
        stream.ask(QUERIES[:2])
        copies.append(file.read_bytes())
    stream.close()
    for older in copies[:-1]:
        file.write_bytes(older)
        stream.fit_places(ALL)
        with pytest.raises(PrivateStoreError, match="an older copy of the budgets"):
            stream.ask()
        stream.close()
    shutil.rmtree(stream.state)
    for _ in range(2):
        stream.fit_places(ALL)
        with pytest.raises(PrivateStoreError, match="not hold the budgets from which run 'run' has answered"):
            stream.ask()
        stream.close()
    file.write_bytes(copies[-1])
    stream.fit_places(ALL)
    stream.ask()
    assert stream.run.num_charges == 1
    stream.close()
    shutil.rmtree(stream.state)
    stream.run = stream.run.ledger.run("another", [])
    stream.fit_places(ALL)
    stream.ask()
    assert stream.run.num_charges == 1  # a new run charges anew


def test_budgets_that_can_not_be_written_let_nothing_out(tmp_path, monkeypatch):
    stream = Stream(tmp_path, reuse=True)
    stream.fit_places(ALL)
    stream.ask(QUERIES[:1])
    left = stream.left(ALL)
    with monkeypatch.context() as patch:
        patch.setattr(type(stream.labeler._budgets), "spend", Mock(side_effect=OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            stream.ask()
    assert len(stream.labeler._engine.answered[1]) == 1
    stream.fit_places(ALL)
    assert stream.left(ALL) == left
    assert stream.run.noted(stream.labeler._budgets.topic).startswith("1:")


# ---------------------------------------------------------------- any sequence of events


events = st.lists(
    st.one_of(
        st.tuples(st.just("table"), st.permutations([0, 1, 2, 3, 5, 6, 8, 9, 10, 11]), st.integers(1, 10)),
        st.tuples(st.just("ask"), st.lists(st.integers(0, 8), min_size=1, max_size=6)),
        st.tuples(st.sampled_from(["restart", "keep a copy", "put the copy back", "exchange"])),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("kind", ["digests of the data module", "numbers"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(events, st.sampled_from([0.05, 0.4, 2.0]))
def test_over_any_reorders_and_restarts_no_record_pays_more_than_its_budget(
    tmp_path_factory, kind, steps, budget
):
    """What is let out is what the paper's algorithm, told who is who, lets out of budgets that it keeps itself."""
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda descriptor: None)
        stream = Stream(folder, kind, release_counts=True, rho=budget)
        literal = Literal(teacher(**{**SETTINGS, "rho": budget}).parameters, C)
        places, copy, file = ALL, None, folder / "state" / FILE_NAME

        def table(chosen):
            literal.remove(list(literal.x))
            literal.add(chosen, unit_rows(ROWS[chosen]), LABELS[chosen])
            stream.fit_places(chosen)

        def ask(which):
            scores = stream.ask(QUERIES[which]).scores.numpy()
            for query, found in zip(which, scores, strict=True):
                _, noisy, around = literal.predict(QUERIES[query], np.zeros(1 + C))
                np.testing.assert_allclose(found, noisy / np.sqrt(around), atol=1e-5)

        def last_mark():
            return stream.run.noted(stream.labeler._budgets.topic)

        table(ALL)
        ask([0])
        for what, *how in steps:
            if what == "ask":
                ask(*how)
            elif what == "table":
                order, count = how
                places = [7, *order[:count], 4] if count % 2 else order[:count]
                table(places)
            elif what == "restart":
                stream.fit_places(places)
            elif what == "keep a copy":
                copy = last_mark(), file.read_bytes()
            elif what == "put the copy back" and copy is not None:
                is_latest, refusals = copy[0] == last_mark(), f"an older copy|{UNKNOWN}|not all"
                stream.close()
                newest = file.read_bytes()
                file.write_bytes(copy[1])
                if not is_latest:
                    with pytest.raises((PrivateStoreError, ValueError), match=refusals):
                        stream.fit_places(places), stream.ask()
                    stream.close()
                    file.write_bytes(newest)
                stream.fit_places(places)
            elif what == "exchange" and kind != "numbers":
                with pytest.raises(ValueError, match=UNKNOWN):
                    stream.refit(torch.cat([ROWS[:2], torch.ones(1, D)]), LABELS[:3])
        stream.close()
        assert max(literal.cost.values()) <= budget * (1 + 1e-9)
        assert stream.run.num_charges == 1
