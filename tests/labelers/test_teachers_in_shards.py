"""Teachers whose private records lie in shards, against one process that holds them all."""

import pytest
import torch
from refusals import refusals
from shard_setup import in_order, members_of, parts_of
from statistics_setup import MADE, fitted, labels_for, table

from pl_privknn.auditing.releases import NearestTeachers
from pl_privknn.labelers import PATE, NoisySGDTeacher
from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import NoiseSource, SeededNoise
from pl_privknn.testing import FreeLedger

COUNT = 60
PARTS = parts_of(COUNT)
EVERY_PART = pytest.mark.parametrize("parts", PARTS)


def records():
    """Every record three times, so that equal ones lie in different shards."""
    features, labels = table(COUNT // 3)
    return features.repeat(3, 1), labels.repeat(3)


def made(name):
    return MADE[name](noise_source=SeededNoise(3), noise_multiplier=2.0)


def led(name, parts):
    """The first of several teachers, which has public features of its own; others have not."""
    features, classes = records()
    members, _ = members_of(lambda: made(name), PARTS[parts], features, labels_for(made(name), classes), 3)
    members[0].fit_public(table(40, seed=7)[0])
    return members


@EVERY_PART
@pytest.mark.parametrize("name", MADE)
def test_released_statistics_are_those_of_one_process(name, parts):
    queries = table(30, seed=5)[0]
    alone = fitted(made(name), *records())
    members = led(name, parts)
    ledgers = [FreeLedger(), FreeLedger()]
    expected, found = (
        teacher.label(queries, ledger) for teacher, ledger in zip((alone, members[0]), ledgers, strict=True)
    )
    # One charge and one draw of noise each, by the first process; sums are in whole numbers.
    assert ledgers[0].rows == ledgers[1].rows
    for number, taken in alone._taken.items():
        assert torch.equal(members[0]._taken[number].noisy, taken.noisy)
    torch.testing.assert_close(found.soft, expected.soft)
    assert all(member._taken == {} for member in members[1:])
    for member in members:
        sums = [taken.noisy for taken in alone._taken.values()]
        assert member.shard.group.sent == len(sums) * 8 * sums[0].numel()


def test_records_of_all_shards_enter_by_what_the_first_one_learned_from_public_examples():
    for name in MADE:
        alone, members = fitted(made(name), *records()), led(name, "three")
        for number, member in enumerate(members[1:]):
            member.fit_public(torch.randn(30, 5, generator=torch.Generator().manual_seed(number)))
        weights = torch.zeros(3, alone._public.shape[1], dtype=torch.float64)
        found, expected = members[0].whole_sum(0, weights), alone.private_sum(0, weights)
        assert torch.equal(found, expected)


class Dies:
    """An exchange that breaks at the sum with a number, as when a process ends."""

    def __init__(self, exchange, at):
        self.group, self.at, self.rank = exchange, at, exchange.rank

    def broadcast(self, order=None):
        return self.group.broadcast(order)

    def sum(self, part):
        self.at -= 1
        if self.at < 0:
            raise RuntimeError("another process of this training ended")
        return self.group.sum(part)


def broken_at(members, number):
    shard = members[0].shard
    members[0].shard = type(shard)(Dies(shard.group, number), shard.first, shard.stride, shard.total)
    return members[0]


def test_a_process_that_dies_costs_nothing_and_its_run_goes_on_with_the_next_release(tmp_path):
    queries = table(30, seed=5)[0]
    teacher = broken_at(led("curvature", "three"), 2)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    run = ledger.run("a", plan=teacher.plan(30, 30, 3))
    teacher.join_run(tmp_path / "kept", run)
    with pytest.raises(RuntimeError, match="another process"):
        teacher.label(queries, run)
    # What was summed up was paid for and kept; for the sum that did not come nothing was.
    assert run.num_charges == 2
    teacher.leave_run()
    run = ledger.run("a")
    resumed = led("curvature", "three")[0]
    resumed.join_run(tmp_path / "kept", run)
    found = resumed.label(queries, run)
    assert run.num_charges == 4
    assert sorted(resumed._taken) == [0, 1, 2, 3]
    alone = fitted(made("curvature"), *records())
    whole = Ledger(tmp_path / "whole.sqlite").run("a", plan=teacher.plan(30, 30, 3))
    torch.testing.assert_close(found.soft, alone.label(queries, whole).soft)


# ---------------------------------------------------------------------------- noisy SGD


class OfRecords(NoiseSource):
    """Coins that belong to a step and a record, wherever that lies; noise that belongs to a step."""

    def __init__(self, rows, key=()):
        self.rows, self.key = list(rows), key

    def random_words(self, count):
        raise AssertionError("nothing else is drawn")

    def stream(self, *key):
        return OfRecords(self.rows, key)

    def bernoulli(self, shape, p):
        assert tuple(shape) == (len(self.rows),)
        return SeededNoise(1).stream(*self.key[:3]).bernoulli((COUNT,), p)[self.rows]

    def normal(self, shape, scale):
        return SeededNoise(2).stream(*self.key).normal(shape, scale)


def sgd(noise, rate=0.4):
    return NoisySGDTeacher(
        rate,
        24,
        6,
        noise_multiplier=0.5,
        noise_source=noise,
        optimization={"steps_per_charge": 4},
        model={"components": 4, "soft": True},
    )


@EVERY_PART
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_noisy_sgd_takes_the_steps_of_one_process_where_coins_belong_to_records(parts, rate):
    queries = table(30, seed=5)[0]
    alone, ledgers = sgd(OfRecords(range(COUNT)), rate), [FreeLedger(), FreeLedger()]
    alone.fit(*records(), 3)
    expected = alone.label(queries, ledgers[0])
    sources = iter(OfRecords(rows) for _, _, rows in PARTS[parts])
    members, _ = members_of(lambda: sgd(next(sources), rate), PARTS[parts], *records(), 3)
    found = members[0].label(queries, ledgers[1])
    torch.testing.assert_close(found.soft, expected.soft, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.labels, expected.labels)
    assert ledgers[0].rows == ledgers[1].rows
    # Six steps of 3 classes and 4 directions and a bias, in float64.
    assert {member.shard.group.sent for member in members} == {6 * 8 * 3 * 5}


def test_a_step_whose_sum_does_not_come_is_not_released():
    members, _ = members_of(lambda: sgd(SeededNoise(0)), PARTS["three"], *records(), 3)
    teacher, ledger = broken_at(members, 5), FreeLedger()
    with pytest.raises(RuntimeError, match="another process"):
        teacher.label(table(30, seed=5)[0], ledger)
    # Paid four by four, before the coins: a crash wastes the rest of a row and forgets nothing.
    assert [row.count for row in ledger.rows] == [4, 2]


# ---------------------------------------------------------------------------- PATE

NEAREST = NearestTeachers()
#: A number for each record, which its part is made of.
NUMBERS = SeededNoise(9).integers(COUNT, 1000)


class Dealt(SeededNoise):
    """Deals out records by their numbers, wherever they lie."""

    def __init__(self, rows):
        super().__init__(4)
        self.rows = list(rows)

    def stream(self, *key):
        return self if key[0] == "partition" else super().stream(*key)

    def integers(self, shape, bound):
        return NUMBERS[self.rows] % bound


class Given(Partitioner):
    """Parts that are known."""

    def __init__(self, parts):
        self.parts = parts

    def _deal(self, features, labels, num_classes, num_parts, noise):
        return self.parts


def pate(count, **given):
    return PATE(count, NEAREST, noise=Gaussian(1.0), progress=False, **given)


@pytest.mark.parametrize("parts", ["one", "two", "three", "four", "unequal"])
def test_teachers_of_all_shards_vote_as_if_they_had_been_trained_in_one_process(parts):
    features, labels = table(COUNT, dimension=3)
    queries, shards = 2 * torch.randn(30, 3, generator=torch.Generator().manual_seed(1)), PARTS[parts]
    if parts == "unequal":
        shards = in_order(4, 47, 9)
    of_record = torch.empty(COUNT, dtype=torch.int64)
    for rank, (_, _, rows) in enumerate(shards):
        own = torch.arange(rank, 7, len(shards))
        of_record[rows] = own[NUMBERS[rows] % len(own)]
    whole = pate(7, partitioner=Given(of_record), noise_source=SeededNoise(4))
    whole.fit(features, labels, 3)
    sources = iter(Dealt(rows) for _, _, rows in shards)
    members, _ = members_of(lambda: pate(7, noise_source=next(sources)), shards, features, labels, 3)
    assert torch.equal(members[0].votes(queries), whole.votes(queries))
    assert (whole.votes(queries) > 0).sum() > 50  # they don't all say the same
    ledgers = [FreeLedger(), FreeLedger()]
    found, expected = (
        each.label(queries, ledger) for each, ledger in zip((members[0], whole), ledgers, strict=True)
    )
    assert torch.equal(found.labels, expected.labels)
    assert ledgers[0].rows == ledgers[1].rows
    assert {member.shard.group.sent for member in members} == {2 * 8 * 3 * len(queries)}


def test_in_shards_a_replaced_record_is_two_changed_teachers_which_is_not_charged_for(tmp_path):
    members, _ = members_of(lambda: pate(6), PARTS["three"], *records(), 3)
    run = Ledger(tmp_path / "ledger.sqlite", adjacency="replace_one").run("a")
    with pytest.raises(ValueError, match=r"states its cost under 'add_remove' only"):
        members[0].label(table(3, seed=5)[0], run)
    alone = pate(6)
    alone.fit(*records(), 3)
    alone.label(table(3, seed=5)[0], run)
    assert run.num_charges == 1


test_what_does_not_go_in_shards_is_refused = refusals(
    {
        r"num_teachers=3 must be at least the number of processes, 4": lambda: members_of(
            lambda: pate(3), PARTS["four"], *records(), 3
        ),
        r"fewer records than 2 teachers": lambda: members_of(lambda: pate(7), PARTS["empty"], *records(), 3),
        "SufficientStatistics.run_command needs a shard": lambda: made("class sums").run_command(None),
        "NoisySGDTeacher.run_command needs a shard": lambda: sgd(SeededNoise(0)).run_command(None),
        "PATE.run_command needs a shard": lambda: pate(3).run_command(None),
    }
)
