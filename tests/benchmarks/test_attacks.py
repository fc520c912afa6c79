"""Configurations of the attacks follow those that are shipped."""

import pytest

from benchmarks.attacks import configuration
from pl_privknn.planning import plan_of
from pl_privknn.privacy import account


@pytest.mark.parametrize("method", ["reverse kNN, shuffle", "Private-kNN", "PATE", "PrivateTraining"])
def test_each_method_costs_what_is_asked_for(method):
    document = configuration(method, 2.0)
    plan = plan_of(document, method, own_code=True)
    epsilon = account(
        plan.charges, delta=plan.delta, adjacency=plan.adjacency or "add_remove", exact=False
    ).epsilon
    assert 1.9 < epsilon < 2.0 + 1e-3
