"""Private records in shards, one a process: the answers of one process that holds them all."""

import json
import types

import pytest
import torch
import torch.distributed as dist

from pl_privknn._processes import ProcessGroup, Shard
from pl_privknn.callbacks import labeling_round
from pl_privknn.callbacks.labeling_round import check_whole_persons, shard_of
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import (
    PATE,
    ClassBalancedPartition,
    LocalReverseKNN,
    PrivateKNN,
)
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.callbacks.sharded_fit import PROCESSES, TEACHERS, fit
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_group


@needs_fork
@pytest.mark.parametrize("name", TEACHERS)
def test_two_processes_answer_as_one(tmp_path, name):
    alone, both, count = tmp_path / "alone", tmp_path / "both", PROCESSES.get(name, 2)
    both.mkdir()
    expected = fit(alone, name, 1)

    def member(rank):
        (tmp_path / f"{rank}.json").write_text(json.dumps(fit(both, name, count)))

    assert in_group(count, member) == [0] * count
    for rank in range(count):
        labels, soft = json.loads((tmp_path / f"{rank}.json").read_text())
        assert labels == expected[0]
        if name in PROCESSES:  # sums of floating-point numbers, whose order is another one
            torch.testing.assert_close(torch.tensor(soft), torch.tensor(expected[1]), rtol=1e-4, atol=1e-5)
        else:
            assert soft == expected[1]
    assert any(label >= 0 for label in expected[0])
    assert (expected[1] is None) == (name in ("private_knn", "pate"))
    # Charged and kept once, by global rank 0; nothing else is left.
    charged = [Ledger.open_readonly(folder / "run.sqlite").report().charged for folder in (alone, both)]
    assert charged[0] == charged[1]
    assert {path.name for path in alone.iterdir()} == {path.name for path in both.iterdir()}
    kept = ("alone.private", "both.private") if name in ("class sums", "ind knn") else ()
    written = {"alone", "both", *kept, *(f"{rank}.json" for rank in range(count))}
    assert {path.name for path in tmp_path.iterdir()} == written


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, images):
        return self.scale * images.flatten(1)


@needs_fork
def test_a_process_that_makes_other_features_of_a_public_example_is_refused(tmp_path):
    data = nine_records()

    def task(rank, group):
        def refused(scale):
            extractor, shard = Scaled(scale if rank else 1.0), Shard(group, rank, 2, 9)
            labeling = labeling_round.LabelingRound(PrivateKNN(2), extractor, None, 1, 1, 1, 0, shard=shard)
            try:
                labeling._check_alike(data)
            except RuntimeError as error:
                return str(error)
            return None

        found = []
        group.shared(lambda: found.extend(refused(scale) for scale in (1.0001, -1.0, 1.1)))
        return found

    first, second = in_two(tmp_path, task)
    assert first == [None] * 3
    assert second[0] is None
    for message in second[1:]:
        assert message.startswith("features: this process computes others")
        assert "\n" not in message


class Pretended:
    """A group of two processes that is never asked for anything."""

    rank, size = 1, 2

    def sum(self, part):
        return 2 * part

    def agree(self, value):
        return True


def nine_records():
    images = torch.rand(9, 1, 4, 4)
    data = ArraysDataModule(images, torch.arange(9) % 3, images[:3], num_classes=3, batch_size=2)
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    "teacher",
    [
        lambda: PATE(3, partitioner=ClassBalancedPartition()),
        lambda: LocalReverseKNN(1, budget=Budget(epsilon=1.0, adjacency="replace_one")),
    ],
)
def test_teachers_of_one_process_refuse_shards(teacher):
    data, message = nine_records(), r"labeler: \w+ .* in one process; use a teacher that takes shards[^\n]*\Z"
    with pytest.raises(ValueError, match=message):
        shard_of(teacher(), data, Pretended(), sharded=True)
    assert shard_of(teacher(), data, Pretended(), sharded=False) is None
    assert shard_of(teacher(), data, ProcessGroup(), sharded=True) is None
    assert shard_of(PrivateKNN(), data, Pretended(), sharded=True).total == 9


def test_teachers_whose_shards_must_last_want_a_file_for_each_process():
    """Under add or remove the number of a row depends on other records, and with it its shard and its teacher."""
    data = nine_records()
    with pytest.raises(ValueError, match=r"sharded=True: PATE .* \(private_embeddings[^\n]*\Z"):
        shard_of(PATE(3), data, Pretended(), sharded=True)
    data.private_in_shards = True
    assert shard_of(PATE(3), data, Pretended(), sharded=True).stride == 1
    # What replaces a record may belong in another shard.
    with pytest.raises(ValueError, match=r"adjacency='replace_one' is not among those of PATE in shards"):
        shard_of(PATE(3), data, Pretended(), True, "replace_one")


def in_two(folder, task):
    """Results of ``task(rank, group)`` in each of two processes."""

    def member(rank):
        dist.init_process_group("gloo")
        group = ProcessGroup(rank, 2)
        (folder / f"{rank}.json").write_text(json.dumps(task(rank, group)))
        group.close()

    assert in_group(2, member) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@needs_fork
def test_processes_that_shuffled_the_private_records_each_in_its_own_way_are_refused(tmp_path):
    """Rows of different orders overlap: a record would be in several shards, and count several times."""

    def told(*orders):
        def task(rank, group):
            order = orders[rank]
            data = ArraysDataModule(
                torch.arange(12.0).div(12).view(12, 1, 1, 1).expand(12, 1, 4, 4)[order],
                torch.zeros(len(order), dtype=torch.int64), torch.rand(3, 1, 4, 4), num_classes=2, batch_size=2,
            )  # fmt: skip
            data.setup("fit")
            try:
                return shard_of(PrivateKNN(), data, group, sharded=True).total
            except ValueError as error:
                return str(error)

        return in_two(tmp_path, task)

    same, other = list(range(12)), [3, 1, 2, 0, *range(4, 12)]
    assert told(same, same) == [12, 12]
    for message in told(same, other):
        assert message.startswith("private set: the processes of this training hold different records")
        assert "\n" not in message
    assert all(message.startswith("private set") for message in told(same, same[:11]))


def test_numbers_of_records_come_with_the_records_of_the_shard(tmp_path):
    data = nine_records()
    data.private_ids, data.private_groups = torch.arange(9) * 10, torch.arange(9) * 100
    teacher = PrivateKNN(2, 1.0)
    labeling = labeling_round.LabelingRound(teacher, torch.nn.Flatten(), None, 1, 1, 1, 0, unit="person")
    for shard, rows in (
        (None, list(range(9))),
        (Shard(Pretended(), 1, 2, 9), [1, 3, 5, 7]),
        (Shard(Pretended(), 0, 1, 9, torch.tensor([2, 7])), [2, 7]),
    ):
        labeling.shard = shard
        records = labeling._records(data, tmp_path)
        assert records.ids.tolist() == [10 * row for row in rows]
        assert records.owners.tolist() == [100 * row for row in rows]


@needs_fork
def test_a_person_lies_in_one_shard(tmp_path):
    images = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    def work(rank, group):
        check_whole_persons(torch.tensor([[4, 1, 4], [2, 3, 0]][rank]), group)
        check_whole_persons(torch.tensor([[], [2]][rank], dtype=torch.int64), group)
        with pytest.raises(ValueError, match="records in several shards"):
            check_whole_persons(torch.tensor([[4, 1, 4], [2, 1, 0]][rank]), group)
        data = ArraysDataModule(images, torch.arange(6) % 2, images, num_classes=2)
        data.setup("fit")
        data.private_groups = torch.tensor([4, 7, 4, 2, 9, 7])
        shard = shard_of(PrivateKNN(2), data, group, True, unit="person")
        return [shard.index(torch.arange(3)).tolist(), shard.total]

    def task(rank, group):
        found = []
        group.shared(lambda: found.append(work(rank, group)))
        return found[0]

    assert in_two(tmp_path, task) == [[[0, 2, 3], 6], [[1, 4, 5], 6]]


def test_seeded_coins_of_shards_differ():
    tossed, ledger = [], FreeLedger()
    for rank in range(2):
        teacher = PrivateKNN(2, 0.5, noise_source=SeededNoise(4))
        shard = Shard(types.SimpleNamespace(rank=rank, from_first=lambda work: work()), rank, 2, 9)
        run = teacher.paying(ledger, "record", shard)
        for _ in range(2):
            coins = run.pay(Gaussian(1.0), 1, "aggregation")
            tossed.append(coins.bernoulli((64,), 0.5).tolist())
        ledger = FreeLedger()  # the same rows
    assert len({tuple(coins) for coins in tossed}) == 4
