"""Teachers whose private records lie in shards, against one process that holds them all."""

import threading

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE, IndKNN, NoisySGDTeacher, PrivateKNN, ReverseKNN
from pl_privknn.labelers.partitions import Partitioner
from pl_privknn.privacy import Budget
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import NoiseSource, SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.statistics.statistics_setup import MADE, fitted, labels_for, table
from tests.neighbors.shard_setup import Members, in_order, parts_of
from tests.setup.nearest_teachers import NearestTeachers
from tests.setup.refusals import refusals

COUNT = 60
PARTS = parts_of(COUNT)
EVERY_PART = pytest.mark.parametrize("parts", PARTS)


def records():
    """Every record three times, so that equal ones lie in different shards."""
    features, labels = table(COUNT // 3)
    return features.repeat(3, 1), labels.repeat(3)


def made(name, **given):
    return MADE[name](noise_source=SeededNoise(3), noise_multiplier=2.0, **given)


def led(name, parts, **given):
    """Teachers of shards, whose public features differ in all but the first."""
    features, classes = records()
    public = [table(40, seed=7)[0]]
    for number in range(len(PARTS[parts]) - 1):
        public.append(torch.randn(30, 5, generator=torch.Generator().manual_seed(number)))
    labels = labels_for(made(name), classes)
    return Members(lambda: made(name, **given), PARTS[parts], features, labels, 3, public)


CENTRED = {"centre_share": 0.3}


@pytest.mark.parametrize(
    ("name", "parts", "given"),
    [
        *(("curvature", parts, {}) for parts in PARTS),
        *((name, "unequal", given) for name in MADE for given in ({}, CENTRED)),
    ],
)
def test_released_statistics_are_those_of_one_process(name, parts, given):
    queries = table(30, seed=5)[0]
    alone = fitted(made(name, **given), *records())
    shards, ledgers = led(name, parts, **given), [FreeLedger(), FreeLedger()]
    members = shards.members
    expected, (found, *others) = alone.label(queries, ledgers[0]), shards.label(queries, ledgers[1])
    # One charge and one draw of noise each, by the first process; sums are in whole numbers.
    assert ledgers[0].rows == ledgers[1].rows
    for number, taken in alone.noisy_sums.items():
        assert torch.equal(members[0].noisy_sums[number].noisy, taken.noisy)
    torch.testing.assert_close(found.probabilities, expected.probabilities)
    assert all(torch.equal(other.labels, found.labels) for other in others)
    assert all(member.noisy_sums == {} for member in members[1:])
    for member in members:
        if given:
            torch.testing.assert_close(member.centre.offset, alone.centre.offset)
        assert member.records.processes.sent == sum(
            8 * taken.noisy.numel() for taken in alone.noisy_sums.values()
        )


def break_at(shards, number):
    """Let the sum with this number fail in the first process, as when another process ends."""
    group = shards.shards[0].group
    working, left = group.sum, iter(range(number))

    def sum_(part):
        if next(left, None) is None:
            raise RuntimeError("another process of this training ended")
        return working(part)

    group.sum = sum_
    return shards


def test_a_process_that_dies_costs_nothing_and_its_run_goes_on_with_the_next_release(tmp_path):
    queries = table(30, seed=5)[0]
    shards = break_at(led("curvature", "three"), 2)
    teacher = shards.members[0]
    ledger = Ledger(tmp_path / "ledger.sqlite")
    run = ledger.run("a", plan=teacher.plan(30, 30, 3))
    shards.each(lambda member: member.join_run(tmp_path / "kept", shards.paying(member, run)))
    with pytest.raises(RuntimeError, match="another process"):
        shards.label(queries, run)
    # What was summed up was paid for and kept; for the sum that did not come nothing was.
    assert run.num_charges == 2
    teacher.leave_run()
    run = ledger.run("a")
    resumed = led("curvature", "three")
    resumed.each(lambda member: member.join_run(tmp_path / "kept", resumed.paying(member, run)))
    found = resumed.label(queries, run)[0]
    assert run.num_charges == 4
    assert sorted(resumed.members[0].noisy_sums) == [0, 1, 2, 3]
    alone = fitted(made("curvature"), *records())
    whole = Ledger(tmp_path / "whole.sqlite").run("a", plan=teacher.plan(30, 30, 3))
    torch.testing.assert_close(found.probabilities, alone.label(queries, whole).probabilities)


class Spent(FreeLedger):
    """A ledger without budget."""

    def charge(self, mechanism, count=1, **stated):
        raise BudgetExceeded("the budget is spent", 2.0, Budget(epsilon=1.0))


ASKED = {
    "sums": lambda: led("class sums", "three"),
    "noisy sgd": lambda: Members(lambda: sgd(SeededNoise(0)), PARTS["three"], *records(), 3),
    "pate": lambda: Members(lambda: pate(6), PARTS["three"], *records(), 3),
    "private knn": lambda: Members(lambda: PrivateKNN(3, 0.5), PARTS["three"], *records(), 3),
    "reverse knn": lambda: Members(
        lambda: ReverseKNN(2, budget=Budget(epsilon=1.0)), PARTS["three"], *records(), 3
    ),
    "ind knn": lambda: Members(
        lambda: IndKNN(0.5, Gaussian(1.0), budget=Budget(epsilon=1.0)), PARTS["three"], *records(), 3
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_refused_charge_ends_every_process_with_the_same_error(name):
    shards = ASKED[name]()

    def refused(member):
        with pytest.raises(BudgetExceeded, match="the budget is spent") as caught:
            member.label(table(30, seed=5)[0], shards.paying(member, Spent()))
        return caught.value.epsilon, caught.value.budget.epsilon

    assert shards.each(refused) == [(2.0, 1.0)] * 3


@pytest.mark.parametrize("name", ASKED)
def test_noise_is_drawn_by_the_first_process_alone(monkeypatch, name):
    shards, drawn = ASKED[name](), []
    monkeypatch.setattr(NoiseSource, "_continuous", noted(drawn, NoiseSource._continuous))
    monkeypatch.setattr(NoiseSource, "_rounded", noted(drawn, NoiseSource._rounded))

    def label(member):
        threads[threading.get_ident()] = member.records.processes.rank
        member.label(table(30, seed=5)[0], shards.paying(member, ledger))

    threads, ledger = {}, FreeLedger()
    shards.each(label)
    assert {threads[thread] for thread in drawn} == {0}


def noted(drawn, draw):
    def noting(*given):
        drawn.append(threading.get_ident())
        return draw(*given)

    return noting


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
    alone.fit(PrivateRecords.of(*records(), 3))
    expected = alone.label(queries, ledgers[0])
    sources = iter(OfRecords(rows) for _, _, rows in PARTS[parts])
    shards = Members(lambda: sgd(next(sources), rate), PARTS[parts], *records(), 3)
    found = shards.label(queries, ledgers[1])[0]
    torch.testing.assert_close(found.probabilities, expected.probabilities, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.labels, expected.labels)
    assert ledgers[0].rows == ledgers[1].rows
    # Six steps of 3 classes and 4 directions and a bias, in float64.
    assert {member.records.processes.sent for member in shards.members} == {6 * 8 * 3 * 5}


def test_a_step_whose_sum_does_not_come_is_not_released():
    shards, ledger = Members(lambda: sgd(SeededNoise(0)), PARTS["three"], *records(), 3), FreeLedger()
    with pytest.raises(RuntimeError, match="another process"):
        break_at(shards, 5).label(table(30, seed=5)[0], ledger)
    # Rows of one, two and more steps, before the coins: a crash wastes the rest of a row and forgets nothing.
    assert [row.count for row in ledger.rows] == [1, 2, 3]


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
    whole.fit(PrivateRecords.of(features, labels, 3))
    sources = iter(Dealt(rows) for _, _, rows in shards)
    together = Members(lambda: pate(7, noise_source=next(sources)), shards, features, labels, 3)
    assert torch.equal(together.each(lambda member: member.votes(queries))[0], whole.votes(queries))
    assert (whole.votes(queries) > 0).sum() > 50  # they don't all say the same
    ledgers = [FreeLedger(), FreeLedger()]
    found, expected = together.label(queries, ledgers[0])[0], whole.label(queries, ledgers[1])
    assert torch.equal(found.labels, expected.labels)
    assert ledgers[0].rows == ledgers[1].rows
    assert {member.records.processes.sent for member in together.members} == {2 * 8 * 3 * len(queries)}


def test_in_shards_a_replaced_record_is_two_changed_teachers_which_is_not_charged_for(tmp_path):
    shards = Members(lambda: pate(6), PARTS["three"], *records(), 3)
    run = Ledger(tmp_path / "ledger.sqlite", Budget(adjacency="replace_one")).run("a")
    with pytest.raises(ValueError, match=r"states its cost under 'add_remove' only"):
        shards.label(table(3, seed=5)[0], run)
    alone = pate(6)
    alone.fit(PrivateRecords.of(*records(), 3))
    alone.label(table(3, seed=5)[0], run)
    assert run.num_charges == 1


test_what_does_not_go_in_shards_is_refused = refusals(
    {
        r"num_teachers=3 must be at least the number of processes, 4": lambda: Members(
            lambda: pate(3), PARTS["four"], *records(), 3
        ),
        r"fewer records than 2 teachers": lambda: Members(lambda: pate(7), PARTS["empty"], *records(), 3),
    }
)
