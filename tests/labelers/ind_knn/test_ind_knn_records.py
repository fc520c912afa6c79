"""Which private record is which: digests, numbers of equal records, numbers that changed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_privknn.labelers.ind_knn.identities import changed_numbers, read_ids
from pl_privknn.privacy.per_record.record_key import RecordKey, as_bytes

KEY = RecordKey(bytes(range(32)))


def test_a_digest_is_of_one_record_alone_and_of_all_of_it():
    rows = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6) % 3
    digests = KEY.digests(rows, labels)
    assert digests.shape == (6, 16)
    assert len(set(as_bytes(digests))) == 6
    order = torch.tensor([3, 0, 5])
    assert torch.equal(KEY.digests(rows[order], labels[order]), digests[order])
    assert torch.equal(
        torch.cat([KEY.digests(rows[i : i + 1], labels[i : i + 1]) for i in range(6)]), digests
    )
    others = [
        (rows[:1], labels[:1] + 1),
        (rows[:1] + 2.0**-20, labels[:1]),
        (rows[:1].reshape(1, 4, 1, 4), labels[:1]),
        (rows[:1].double(), labels[:1]),
        (torch.nn.functional.pad(rows[:1], (0, 1)), labels[:1]),
    ]
    for row, label in others:
        assert not torch.equal(KEY.digests(row, label), digests[:1])
    other = RecordKey(bytes(32)).digests(rows, labels)
    assert not set(as_bytes(other)) & set(as_bytes(digests))
    assert KEY.key.hex() not in repr(KEY)
    assert repr(KEY.key) not in repr(KEY)
    assert len(KEY.digests(rows[:0], labels[:0])) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=12), st.randoms(use_true_random=False))
def test_equal_records_have_as_many_numbers_as_copies_in_any_order(which, shuffler):
    rows = torch.eye(6)
    shuffled = shuffler.sample(which, len(which))

    def numbers(chosen):
        place = torch.tensor(chosen, dtype=torch.int64)
        return KEY.numbers(KEY.digests(rows[place], place))

    first, following = numbers(which)
    assert len(set(first.tolist())) == len(which)
    assert set(numbers(shuffled)[0].tolist()) == set(first.tolist())
    for chosen in set(which):
        copies = {number for number, record in zip(first.tolist(), which, strict=True) if record == chosen}
        alone, following_alone = numbers([chosen] * len(copies))
        assert set(alone.tolist()) == copies
        assert set(numbers([chosen] * (len(copies) + 1))[0].tolist()) - copies == set(
            following_alone.tolist()
        )
        assert set(following_alone.tolist()) <= set(following.tolist())


@pytest.mark.parametrize(
    ("known", "now", "changed"),
    [
        ({1: b"a", 2: b"b"}, {1: b"a", 2: b"b"}, False),
        ({1: b"a", 2: b"b"}, {2: b"b"}, False),
        ({1: b"a", 2: b"b"}, {1: b"c", 2: b"d"}, False),  # other preprocessing
        ({1: b"a", 2: b"b"}, {1: b"a", 2: b"b", 3: b"a"}, False),  # an equal record came
        ({1: b"a", 2: b"a"}, {2: b"a", 1: b"a"}, False),
        ({}, {1: b"a"}, False),
        ({1: b"a", 2: b"b"}, {1: b"b", 2: b"a"}, True),
        ({1: b"a", 2: b"b"}, {1: b"b"}, True),
        ({1: b"a", 2: b"b"}, {3: b"a"}, True),  # a second number for a known record
        ({1: b"a", 2: b"a"}, {1: b"a", 3: b"a"}, True),
    ],
)
def test_changed_numbers(known, now, changed):
    assert changed_numbers(known, now) is changed


@pytest.mark.parametrize(
    "ids", [[1, 2], [1, 2, 3, 4], [1, 2, 2], [[1, 2, 3]], [1.0, 2.0, 3.0], [True, False, True], [2**63, 1, 2]]
)
def test_bad_ids_are_refused_without_a_number(ids):
    with pytest.raises(ValueError, match="ids: shape and numbers") as error:
        read_ids(np.array(ids), 3)
    assert not any(
        character.isdigit() for character in str(error.value).replace("int64", "").replace("float64", "")
    )


def test_ids_may_lie_in_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_ids(tmp_path / "ids.npy", 3)
    for content in (b"", b"PK\x03\x04", b"1, 2, 3"):
        (tmp_path / "ids.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"ids='.*' can't be read as an array; write it with numpy.save"):
            read_ids(str(tmp_path / "ids.npy"), 3)
    np.savez(tmp_path / "ids.npz", ids=np.arange(3))
    with pytest.raises(ValueError, match="can't be read as an array"):
        read_ids(tmp_path / "ids.npz", 3)
    np.save(tmp_path / "ids.npy", np.array([7, -3, 2], np.int16))
    assert read_ids(tmp_path / "ids.npy", 3).tolist() == read_ids([7, -3, 2], 3).tolist() == [7, -3, 2]
