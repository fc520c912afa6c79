"""Charges name the neighbouring relation they hold under, and the source of their noise."""

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE, Labeler, PrivateKNN
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.partitions import RandomPartition
from pl_privknn.labelers.teachers import LinearTeachers
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.mechanisms.base import ADJACENCIES
from pl_privknn.privacy.mechanisms.steps import PaidSteps, step_mechanism
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.labelers.ind_knn.ind_knn_setup import PARAMETERS, C, D
from tests.neighbors.shard_setup import Members, parts_of
from tests.setup.scripted_noise import Scripted


class ReplaceOnly(RandomPartition):
    """A partition that states one relation only."""

    adjacencies = ("replace_one",)


def of_replaced_records(run):
    labeler = PATE(4, LinearTeachers(steps=2), ReplaceOnly(), noise=Gaussian(2.0), progress=False)
    labeler.fit(PrivateRecords.of(torch.randn(40, 4), torch.arange(40) % 3, 3))
    labeler.noise_source = Scripted([])
    labeler.label(torch.randn(3, 4), run)


def predictor(run):
    IndKNNPredictor(PARAMETERS, C, D, ledger=run, noise_source=Scripted([])).predict(torch.ones(1, D))


def step(run):
    PaidSteps(run, step_mechanism(1.0, 1.0, 0.5), 4, 2).release(torch.zeros(3), Scripted([]))


@pytest.mark.parametrize("pays", [of_replaced_records, predictor, step])
def test_ledgers_of_another_adjacency_refuse_before_anything_is_drawn(tmp_path, pays):
    """Charges of the other labelers are in ``testing/test_check_labeler.py``."""
    stated, other = ADJACENCIES if pays is not of_replaced_records else ADJACENCIES[::-1]
    run = Ledger(tmp_path / "ledger.sqlite", Budget(adjacency=other)).run("a")
    with pytest.raises(ValueError, match=f"adjacency='{other}' of the ledger.*{stated}.*[Nn]othing"):
        pays(run)
    assert run.ledger.report().charged == ()


def test_three_lines_charge_a_ledger_with_all_that_it_must_state(tmp_path):
    features, labels, queries = torch.randn(60, 4), torch.arange(60) % 3, torch.randn(5, 4)
    teacher, ledger = PrivateKNN(5, 0.5), Ledger(tmp_path / "ledger.sqlite", Budget(epsilon=1.0))
    teacher.fit(PrivateRecords.of(features, labels, 3))
    assert teacher.label(queries, ledger.run("first")).labels.shape == (5,)
    assert ledger.report().spent.guarantee == "unconditional"
    # The row states the teacher's noise source, the unit of its records, and its adjacencies.
    teacher.noise_source = SeededNoise(0)
    teacher.label(queries, ledger.run("first"))
    assert ledger.report().spent.guarantee == "none"
    charged = ledger.report().charged
    teacher.fit(PrivateRecords.of(features, labels, 3, owners=torch.arange(60) // 2))
    with pytest.raises(ValueError, match=r"unit='person': the ledger .* counts by record"):
        teacher.label(queries, ledger.run("first"))
    assert ledger.report().charged == charged


def test_a_handle_pays_on_global_rank_0_and_all_processes_get_the_same_row_and_streams_of_their_own():
    features, labels = torch.randn(60, 4), torch.arange(60) % 3
    shards = Members(
        lambda: PrivateKNN(2, noise_source=SeededNoise(0)), parts_of(60)["three"], features, labels, 3
    )
    free = FreeLedger()
    free.charge(Gaussian(1.0))

    def paid(member):
        run = shards.paying(member, free)
        noise = run.pay(Gaussian(2.0), 3, "votes")
        return run.charged(Gaussian(2.0)), run.charge(Gaussian(2.0), 1), noise.uniform(4).tolist()

    found = shards.each(paid)
    assert [row.count for row in free.rows] == [1, 3, 1]
    assert [(charged, row) for charged, row, _ in found] == [(3, 2)] * 3
    assert len({tuple(drawn) for _, _, drawn in found}) == 3


def test_a_labeler_has_six_attributes():
    named = {name for name, kept in vars(Labeler).items() if not callable(kept)} | {*Labeler.__annotations__}
    assert {name for name in named if not name.startswith("_")} == {
        *("noise_source", "adjacencies", "tasks", "free_parameters", "capabilities", "records"),
    }
