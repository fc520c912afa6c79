"""Multi-label labelers: what they refuse. What they draw and charge is in ``testing/test_check_labeler.py``."""

import math

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers.pate_training import ClassBalancedPartition
from pl_privknn.privacy.mechanisms import ExponentialArgmax, Gaussian
from pl_privknn.testing import FreeLedger
from tests.labelers.multilabel.attributes_setup import attribute_knn, attribute_pate, attribute_reverse_knn
from tests.labelers.multilabel.multilabel_setup import clusters
from tests.setup.refusals import refusals

MAKERS = [
    lambda: attribute_knn(5, 0.5),
    lambda: attribute_pate(3, progress=False),
    lambda: attribute_reverse_knn(epsilon=1.0),
]


@pytest.mark.parametrize("make", MAKERS)
def test_tables_that_do_not_fit_are_refused(make):
    features, labels, queries, _ = clusters()
    for bad in (labels[:, 0], labels[:, :4], labels.float(), labels * 2):
        with pytest.raises(ValueError, match="labels"):
            make().fit(PrivateRecords.of(features, bad, 5))
    with pytest.raises(ValueError, match="features"):
        make().fit(PrivateRecords.of(features * math.nan, labels, 5))
    with pytest.raises(RuntimeError, match="private table"):
        make().label(queries, FreeLedger())


def few():
    teacher = attribute_reverse_knn(k=3, epsilon=1.0)
    teacher.fit(PrivateRecords.of(*clusters()[:2], 5))
    teacher.label(torch.zeros(2, 2), FreeLedger())


test_parameters_that_do_not_fit_are_refused = refusals(
    {
        "noise": lambda: attribute_knn(noise=ExponentialArgmax(5.0)),
        "tau": lambda: attribute_knn(tau=0),
        "l2_sensitivity": lambda: attribute_knn(tau=2, noise=Gaussian(5.0, 1.4)).plan(5, 5, 10),
        "k=300": lambda: attribute_knn(sampling_rate=1.0).fit(PrivateRecords.of(*clusters()[:2], 5)),
        "partitioner": lambda: attribute_pate(partitioner=ClassBalancedPartition()),
        "give exactly one": attribute_reverse_knn,
        r"attributes=.* task=.multiclass.": lambda: attribute_knn(task="multiclass"),
        "fewer than k=3": few,
    }
)
