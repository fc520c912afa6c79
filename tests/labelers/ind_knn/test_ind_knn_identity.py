"""A record keeps its own budget, wherever it stands in a table, or nothing goes on."""

import numpy as np
import pytest
import torch
from grouped import grouped
from ind_knn_stream import (
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
    records,
)

from pl_privknn.labelers.ind_knn.labeler import IndKNN


def test_reordered_and_shorter_tables_keep_each_records_budget(tmp_path, kind):
    stream = Stream(tmp_path, kind)
    stream.fit_places(ALL)
    stream.ask()
    left = stream.left(ALL)
    assert len(set(left.values())) > 5
    for places in (ALL[::-1], [0, 11, 4, 7, 3], [7, 4], [2], ALL):
        stream.fit_places(places)
        assert stream.left(places) == {place: left[place] for place in places}
        stream.ask(QUERIES[:1])
        left |= stream.left(places)
    assert stream.run.num_charges == 1
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").glob("[!b]*")} == {0o600}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_exchanged_records_are_refused_or_new(tmp_path, kind):
    stream = Stream(tmp_path, kind)
    stream.fit_places(ALL)
    stream.ask()
    left = stream.left(ALL)
    rows, labels, numbers = ROWS.clone(), LABELS.clone(), NUMBERS.copy()
    rows[3], numbers[3] = torch.ones(D), 1234
    if kind == "numbers":
        stream.fit(rows, labels, numbers)
        assert stream.left(ALL) == left | {3: SETTINGS["budget"]}
    else:
        with pytest.raises(ValueError, match=UNKNOWN):
            stream.fit(rows, labels, numbers)
        with pytest.raises(ValueError, match=UNKNOWN):  # another label is another record
            stream.fit(ROWS, LABELS.roll(1), NUMBERS)
        with pytest.raises(ValueError, match=UNKNOWN):  # a copy more than there was
            stream.fit_places([*ALL, 2])
        with pytest.raises(ValueError, match="of some that are equal not all are there"):
            stream.fit_places([0, 4])
    stream.fit_places(ALL)
    assert stream.left(ALL) == left


def test_before_the_first_answer_the_table_may_be_another(tmp_path, kind):
    stream = Stream(tmp_path, kind)
    stream.fit(*records(20, seed=3), np.arange(20))
    stream.fit_places([0, 4, 7, 1])
    stream.ask()
    left = stream.left([0, 4, 7, 1])
    stream.fit_places([1, 0])
    assert stream.left([1, 0]) == {1: left[1], 0: left[0]}
    if kind != "numbers":
        with pytest.raises(ValueError, match=UNKNOWN):
            stream.fit(*records(20, seed=3), np.arange(20))


def test_other_features_of_the_same_records(tmp_path, kind):
    stream = Stream(tmp_path, kind)
    stream.fit_places(ALL)
    stream.ask()
    left = stream.left(ALL)
    other = torch.rand(12, 9)
    if kind == "digests":
        with pytest.raises(ValueError, match=UNKNOWN):
            stream.refit(ROWS, LABELS, NUMBERS, other)
        assert stream.left(ALL) == left  # the table before is still there
        stream.refit(ROWS, LABELS, NUMBERS, ROWS.clone())
    else:
        stream.refit(ROWS, LABELS, NUMBERS, other)
    assert stream.left(ALL) == left


def test_numbers_that_moved_are_noticed_where_the_data_module_shows_the_records(tmp_path):
    stream = Stream(tmp_path)

    def fit(places, numbers):
        stream.close()
        stream.labeler = IndKNN(**grouped(IndKNN, **stream.settings, records={"ids": numbers}))
        stream.labeler.private_digests = stream.labeler.record_digests(ROWS[places], LABELS[places])
        stream.labeler.fit(ROWS[places], LABELS[places], C)

    order = np.roll(ALL, 1)
    fit(ALL, NUMBERS)
    fit(order, NUMBERS)  # nothing was asked yet
    fit(ALL, NUMBERS)
    stream.ask()
    left = stream.left(ALL)
    for places, numbers in ((order, NUMBERS), (ALL, NUMBERS + 1000), (ALL[1:], NUMBERS[:-1])):
        with pytest.raises(ValueError, match="come under another number than before"):
            fit(places, numbers)
    fit(order, NUMBERS[order])
    assert stream.left(order.tolist()) == left


def test_identities_stay_of_one_kind(tmp_path):
    stream = Stream(tmp_path / "a", "digests")
    stream.fit_places(ALL)
    stream.ask()
    stream.kind = "numbers"
    with pytest.raises(ValueError, match="belong to records without numbers"):
        stream.fit_places(ALL)
    stream = Stream(tmp_path / "b", "numbers")
    stream.fit_places(ALL)
    stream.ask()
    stream.kind = "digests"
    with pytest.raises(ValueError, match="belong to records by their numbers"):
        stream.fit_places(ALL)


def test_numbers_of_the_data_module(tmp_path):
    stream = Stream(tmp_path)
    for places in (ALL, ALL[::-1]):
        stream.close()
        stream.labeler = IndKNN(**grouped(IndKNN, **stream.settings))
        stream.labeler.private_ids = torch.from_numpy(NUMBERS[places])
        stream.labeler.fit(torch.rand(12, D), LABELS[places], C)
        np.testing.assert_array_equal(stream.labeler._engine.table.ids, NUMBERS[places])


def test_messages_show_nothing_of_the_records(tmp_path):
    stream = Stream(tmp_path)
    stream.fit_places(ALL)
    stream.ask()
    for rows, labels in (records(17, seed=5), (ROWS[:5], LABELS[:5])):
        with pytest.raises(ValueError, match="private records") as error:
            stream.fit(rows, labels, None)
        assert not any(character.isdigit() for character in str(error.value))
        assert "\n" not in str(error.value)
