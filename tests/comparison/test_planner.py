"""The noise of a method is found from what its own plan costs."""

import copy
import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from pl_privknn.comparison.run import Planner, runs_of
from pl_privknn.comparison.spec import comparison_of
from pl_privknn.config import ConfigurationError, put
from tests.comparison.compare_documents import KNN, SIGMA, document


def sigma_of_gaussian(epsilon, delta, length):
    """Balle and Wang (2018), Theorem 8: the exact σ of one Gaussian release of sensitivity ``length``."""

    def excess(sigma):
        a, b = length / (2 * sigma), epsilon * sigma / length
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(excess, 1e-2, 1e4)


def test_noise_of_any_labeler_is_found_from_its_own_plan(tmp_path, monkeypatch):
    (tmp_path / "foreign_teacher.py").write_text(
        "from pl_privknn import Gaussian, Labeler\n"
        "from pl_privknn.privacy.mechanisms import Charge\n"
        "class Foreign(Labeler):\n"
        "    def __init__(self, noise: float):\n"
        "        super().__init__()\n"
        "        self.noise = noise\n"
        "    def fit(self, records): ...\n"
        "    def label(self, queries, ledger, max_answers=None): ...\n"
        "    def plan(self, num_queries, max_answers, num_classes, rounds=1):\n"
        "        return [Charge(Gaussian(self.noise, 3.0), max_answers * rounds)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    noise = "labeling.labeler.init_args.noise"
    sizes = {"rounds": 2, "queries_per_round": 10, "max_answers": 8}
    method = {
        "name": "foreign",
        "labeling": {"labeler": {"class_path": "foreign_teacher.Foreign"}, **sizes},
        "find": noise,
    }
    comparison = comparison_of(document(methods=[method], epsilons=[0.5, 2]))
    planner = Planner()
    for run in runs_of(comparison):
        planned = planner.plan(run)
        # 8 answers a round for 2 rounds by that plan, of sensitivity 3 each: one release of length 3·√16.
        wanted = sigma_of_gaussian(run.epsilon, 1e-4, 12.0)
        found = planned.calibrated[noise]
        assert wanted * (1 - 1e-4) <= found <= wanted * 1.004
        assert run.epsilon * 0.995 <= planned.epsilon <= run.epsilon
    sys.modules.pop("foreign_teacher")


def test_plans_that_pass_their_target_are_refused():
    method = {**KNN, "settings": {0.5: {SIGMA: 5.0}, 2.0: {SIGMA: 500.0}}, "epsilons": [0.5, 2]}
    del method["find"]
    comparison = comparison_of(document(methods=[method]))
    planner = Planner()
    dear, cheap = list(runs_of(comparison))[:2]
    with pytest.raises(ConfigurationError, match=r"knn ε=0.5 .*costs ε="):
        planner.plan(dear)
    assert planner.plan(cheap).epsilon < 2
    # Under so little noise a single query is too dear.
    short = copy.deepcopy(KNN) | {"find": "labeling.queries_per_round", "epsilons": [0.5]}
    put(short, SIGMA, 0.01)
    with pytest.raises(ConfigurationError, match=r"find labeling\.queries_per_round: "):
        planner.plan(next(runs_of(comparison_of(document(methods=[short])))))
