"""Charges name the neighbouring relation they hold under, and the source of their noise."""

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.partitions import RandomPartition
from pl_privknn.labelers.teachers import LinearTeachers
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.mechanisms.base import ADJACENCIES
from pl_privknn.privacy.mechanisms.steps import PaidSteps, step_mechanism
from tests.labelers.ind_knn.ind_knn_setup import PARAMETERS, C, D
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
