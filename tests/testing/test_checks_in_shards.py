"""Teachers whose records lie in shards keep their promises; faults that shards make possible are found."""

import pytest
from grouped import grouped

from pl_privknn import Gaussian, Laplace
from pl_privknn.labelers import (
    PATE,
    IndKNN,
    LinearTeachers,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    Screening,
    SufficientStatistics,
)
from pl_privknn.labelers.ind_knn import RecordBudgets
from pl_privknn.labelers.reverse_knn import decide
from pl_privknn.testing import LabelerCheckError, check_labeler

ROOT2 = 2**0.5
STREAM = "stream of gaussian releases (sum of squares of move / sigma)"
BUDGETS = {"budgets": RecordBudgets(budget=0.08, sigma1=4.0)}
SUMS = {"noise_multiplier": 2.0, "expected_records": 30}


def sgd(cls=NoisySGDTeacher):
    return cls(0.5, 12, 4, noise_multiplier=2.0, components=3, steps_per_charge=2)


def sampled(cls=PrivateKNN):
    return cls(5, 0.4, Screening(3, 1.0), Gaussian(3.0))


#: Teachers, the number of shards, and the largest moves of one record that the tables show.
HONEST = {
    "knn sampled": (sampled(), 3, {"gaussian (L2)": ROOT2, "noisy_screening (largest count)": 1.0}),
    "reverse knn": (ReverseKNN(2, 1.0), 4, {"laplace (L1)": 2.0}),
    "class sums": (SufficientStatistics(components=3, **SUMS), 2, {"gaussian (L2)": 1.09**0.5}),
    "curvature": (PreconditionedGradients(releases=2, **SUMS), 2, {"gaussian (L2)": 0.5}),
    "ind knn": (IndKNN(0.5, 2.0, **grouped(IndKNN, **BUDGETS)), 3, {STREAM: 0.16}),
    "noisy sgd": (sgd(), 3, {"gaussian (L2)": 0.25}),
    "pate": (PATE(4, LinearTeachers(2), noise=Gaussian(2.0), progress=False), 3, {"gaussian (L2)": ROOT2}),
}


@pytest.mark.long("curvature")  # whose sums are those of the class sums
@pytest.mark.parametrize("name", HONEST)
def test_teachers_in_shards_keep_their_promises(name):
    labeler, shards, bounds = HONEST[name]
    report = check_labeler(labeler, shards=shards, num_queries=4)
    assert report.labeler == type(labeler).__name__
    largest = report.largest[f"{labeler.tasks[0]}, add_remove"]
    assert largest.pairs >= 20
    for what, bound in bounds.items():
        move = largest.moves[what]
        assert move.allowed == pytest.approx(bound, rel=1e-6)
        # Of a stream, a rest stays that is too little for one more answer.
        assert (0.85 if what == STREAM else 0.95) * bound < move.amount <= bound * (1 + 1e-6)


# ---------------------------------------------------------------------------- faults


class SharedSeeds(PrivateKNN):
    """Shards toss the same coins."""

    def _own_coins(self, release):
        return self.noise_source.stream("shard", release).bernoulli


class SameCoinsAgain(PrivateKNN):
    """Shards toss the same coins in later rounds and resumed runs."""

    def _own_coins(self, release):
        return super()._own_coins(1)


class VotesTwice(ReverseKNN):
    """Records of shards are counted twice."""

    def run_command(self, order):
        self.shard.group.sum(2 * self.partial(order))


class CountedByTheFirst(SufficientStatistics):
    """The first shard's records enter a second time."""

    def whole_sum(self, release, weights):
        return super().whole_sum(release, weights) + self.private_sum(release, weights)


class OwnNoise(SufficientStatistics):
    """Each shard noises its own sum, before anything is paid."""

    def private_sum(self, release, weights):
        total = super().private_sum(release, weights)
        return total + self.noise_source.stream("own", self.shard.group.rank).integers(total.shape, 2**24)


class ClippedByShard(NoisySGDTeacher):
    """A shard's gradients are scaled up."""

    def partial(self, command):
        found = super().partial(command)
        return 3 * found if self.shard.group.rank else found


class VotesManyTimes(IndKNN):
    """The neighbours of other shards vote eight times, and pay once."""

    def partial(self, command):
        found = super().partial(command)
        return 8 * found if command[0] == "votes" and self.shard.group.rank else found


class VotesForNothing(IndKNN):
    """What is spent in other shards is forgotten at the next query."""

    def partial(self, command):
        if command[0] == "begin":
            self._left_at_first = self._budgets.left.copy()
        found = super().partial(command)
        if command[0] == "turn" and self.shard.group.rank:
            self._budgets.left[:] = self._left_at_first
        return found


class CountedAtFirst(IndKNN):
    """The first shard counts its own neighbours twice."""

    def partial(self, command):
        found = super().partial(command)
        return 2 * found if command[0] == "turn" and not self.shard.group.rank else found


class NoiseOfAShard(ReverseKNN):
    """The first process draws its share of the noise alone, as if others drew theirs."""

    def release(self, counts, ledger, max_answers=None):
        noise = self.charge_and_draw(ledger, self.noise, 1, "counts")
        noisy = Laplace(self.noise.scale / 3).add_noise(counts, noise)
        return decide(noisy.double(), self.noise.deviation, 0.0, True, max_answers)


FAULTS = {
    "noise of a shard": (lambda: NoiseOfAShard(2, 1.0), "draws with Laplace.*, which was not charged"),
    "votes many times": (lambda: VotesManyTimes(0.5, 2.0, **BUDGETS), f"moves {STREAM[:10]}"),
    "votes for nothing": (lambda: VotesForNothing(0.5, 2.0, **BUDGETS), f"moves {STREAM[:10]}"),
    "counted at first": (lambda: CountedAtFirst(0.5, 2.0, **BUDGETS), f"moves {STREAM[:10]}"),
    "shared seeds": (lambda: sampled(SharedSeeds), "fresh noise: a later draw repeats the noise of stream"),
    "same coins again": (lambda: sampled(SameCoinsAgain), "fresh noise: .* repeats the noise of stream"),
    "votes twice": (lambda: VotesTwice(2, 1.0), r"moves laplace \(L1\) by 4, and 2 was charged"),
    "counted by the first": (
        lambda: CountedByTheFirst(**SUMS),
        r"moves gaussian \(L2\) by 2.08806, and 1.04",
    ),
    "own noise": (lambda: OwnNoise(**SUMS), "draws integers before it charges"),
    "clipped by shard": (
        lambda: sgd(ClippedByShard),
        r"moves gaussian \(L2\) by 0.7\d*, and 0.25 was charged",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_shards_are_caught(name):
    make, message = FAULTS[name]
    with pytest.raises(LabelerCheckError, match=message) as caught:
        check_labeler(make(), shards=3, num_queries=4)
    assert "\n" not in str(caught.value)


def test_what_looks_at_all_records_in_one_process_is_refused():
    with pytest.raises(ValueError, match=r"shards=2: ReverseKNN with these settings looks at .* shards=1"):
        check_labeler(ReverseKNN(1, 1.0, trust="local"), shards=2)
