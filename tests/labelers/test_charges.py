"""What every teacher charges: under its own neighbouring relation, whatever the private table, within its plan."""

from collections import Counter

import numpy as np
import pytest
import torch
from attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from ind_knn_setup import PARAMETERS, C, D

from pl_privknn.labelers import (
    PATE,
    IndKNN,
    NoisySGDTeacher,
    PreconditionedGradients,
    PrivateKNN,
    ReverseKNN,
    SufficientStatistics,
)
from pl_privknn.labelers.base import UsesPublicFeatures
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.pate import GNMAX
from pl_privknn.labelers.pate_training import LinearTeachers, RandomPartition
from pl_privknn.labelers.private_knn import PrivateRegression, Screening
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import ADJACENCIES, Gaussian
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.privacy.noisy_steps import PaidSteps, step_mechanism
from pl_privknn.testing import FreeLedger


class Silent(SeededNoise):
    """Noise that nobody may draw; coins of a batch that is never released do no harm."""

    def _drawn(self, *arguments):
        raise AssertionError("noise was drawn")

    normal = laplace = uniform = integers = rounded_normal = rounded_laplace = _drawn
    normal_at_least = exponential_choice = _drawn

    def stream(self, *key):
        return self


class ReplaceOnly(RandomPartition):
    """A partition that states one relation only, so that ledgers of the other one have to be refused."""

    adjacencies = ("replace_one",)


FEW = {"num_teachers": 4, "partitioner": ReplaceOnly(), "progress": False}
LABELERS = {
    "private_knn": lambda: PrivateKNN(5, 1.0, Screening(1.0, 0.1), Gaussian(3.0)),
    "pate": lambda: PATE(teachers=LinearTeachers(steps=2), aggregator=GNMAX(2.0), **FEW),
    "reverse_knn": lambda: ReverseKNN(epsilon=1.0),
    "reverse_knn_replaced": lambda: ReverseKNN(epsilon=1.0, adjacency="replace_one"),
    "reverse_knn_local": lambda: ReverseKNN(epsilon=1.0, trust="local"),
    "ind_knn": lambda: IndKNN(0.5, 0.5, epsilon=1.0),
    "noisy_sgd": lambda: NoisySGDTeacher(steps=3, noise_multiplier=1.0, components=None),
    "class_sums": lambda: SufficientStatistics(noise_multiplier=1.0),
    "class_sums_replaced": lambda: SufficientStatistics(noise_multiplier=1.0, adjacency="replace_one"),
    "public_curvature": lambda: PreconditionedGradients(noise_multiplier=1.0, releases=2),
    "class_sums_of_attributes": lambda: SufficientStatistics(
        noise_multiplier=1.0, adjacency="replace_one", task="multilabel"
    ),
    "multilabel_knn": lambda: attribute_knn(5, 1.0),
    "multilabel_pate": lambda: attribute_pate(teachers=LinearTeachers(steps=2), **FEW),
    "multilabel_reverse_knn": lambda: attribute_reverse_knn(epsilon=1.0),
    "multilabel_reverse_knn_replaced": lambda: attribute_reverse_knn(epsilon=1.0, adjacency="replace_one"),
}


def refused(tmp_path, stated, pays):
    """Assert that a run of a ledger of each relation that is not ``stated`` refuses what ``pays`` charges."""
    others = [adjacency for adjacency in ADJACENCIES if adjacency not in stated]
    assert others
    for other in others:
        run = Ledger(tmp_path / f"{other}.sqlite", adjacency=other).run("a")
        with pytest.raises(ValueError, match=f"adjacency='{other}' of the ledger.*{stated[0]}.*[Nn]othing"):
            pays(run)
        assert run.ledger.report().charged == ()


def fitted(labeler, count=40, skew=False):
    """The labeler with a private table of three classes (or attributes), even or nearly all of one."""
    generator = torch.Generator().manual_seed(count)
    features, labels = torch.randn(count, 4, generator=generator), torch.arange(count) % 3
    if skew:
        features, labels = 3 * features + 1, (labels * (torch.arange(count) < 9)).long()
    if "multilabel" in labeler.tasks:
        labels = torch.stack([labels == 0, labels == 1, labels > 0], dim=1).long()
    labeler.noise_source = SeededNoise(0)
    if isinstance(labeler, UsesPublicFeatures):
        labeler.fit_public(torch.randn(20, 4, generator=torch.Generator().manual_seed(2)))
    labeler.fit(features, labels, 3)
    return labeler


def asked(count=6):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", LABELERS)
def test_labelers_refuse_a_ledger_of_another_adjacency_before_they_draw(tmp_path, name):
    labeler = fitted(LABELERS[name]())
    labeler.noise_source = Silent(0)
    refused(tmp_path, labeler.adjacencies, lambda run: labeler.label(asked(), run))


@pytest.mark.parametrize("name", LABELERS)
def test_what_is_charged_does_not_depend_on_the_private_table(name):
    charged = []
    for table in ({"count": 40}, {"count": 41}, {"count": 60, "skew": True}):
        ledger = FreeLedger()
        fitted(LABELERS[name](), **table).label(asked(), ledger)
        charged.append([charge.mechanism for charge in ledger.rows])
    assert charged[0] == charged[1] == charged[2] != []


@pytest.mark.parametrize("name", LABELERS)
def test_rounds_stay_within_their_plan(name):
    labeler, ledger, left, spent = LABELERS[name](), FreeLedger(), 7, Counter()
    plan = {charge.mechanism: charge.count for charge in labeler.plan(10, 7, 3, rounds=2)}
    for queries in asked(10).split(5):
        answered = fitted(labeler).label(queries, ledger, max_answers=left).answered
        left -= int(answered.sum())
        assert left >= 0
    for charge in ledger.rows:
        spent[charge.mechanism] += charge.count
    assert left == 0
    assert spent.keys() == plan.keys()
    assert all(spent[mechanism] <= plan[mechanism] for mechanism in plan)


def test_teachers_of_numbers_predictors_and_noisy_steps_are_for_added_records(tmp_path):
    regression = PrivateRegression(0.0, 1.0, 5, 1.0, noise_source=Silent(0))
    regression.fit(torch.randn(40, 4), torch.rand(40))
    refused(tmp_path, ("add_remove",), lambda run: regression.predict(torch.randn(3, 4), run))

    def predict(run):
        IndKNNPredictor(PARAMETERS, C, D, ledger=run, noise_source=Silent(0)).predict(torch.ones(1, D))

    def step(run):
        PaidSteps(run, step_mechanism(1.0, 1.0, 0.5), 4, 2).release(torch.zeros(3), Silent(0))

    refused(tmp_path, ("add_remove",), predict)
    refused(tmp_path, ("add_remove",), step)


def test_charges_that_state_too_little_make_the_ledger_conditional(tmp_path):
    mechanism = Gaussian(20.0)
    stated = {"noise": SystemNoise(), "adjacencies": ("add_remove",)}
    for number, left_out in enumerate([(), ("noise",), ("adjacencies",), ("noise", "adjacencies")]):
        run = Ledger(tmp_path / f"{number}.sqlite").run("a")
        run.charge(mechanism, **{name: value for name, value in stated.items() if name not in left_out})
        assert run.ledger.report().guarantee.guarantee == ("conditional" if left_out else "unconditional")


def test_ledgers_of_both_adjacencies_take_what_holds_under_both(tmp_path):
    votes = np.array([[3, 1], [0, 4]])
    for adjacency in ADJACENCIES:
        pate = PATE(4, teachers=LinearTeachers(steps=2), aggregator=GNMAX(2.0), progress=False)
        pate.votes = lambda queries: torch.as_tensor(votes)
        run = Ledger(tmp_path / f"{adjacency}.sqlite", adjacency=adjacency).run("a")
        pate.label(torch.zeros(2, 4), run)
        assert run.ledger.report().guarantee.guarantee == "unconditional"
