"""What plans say of usefulness, against integrals and a labeler's own answers."""

import json

import pytest
import torch
from attributes_setup import attribute_knn, attribute_reverse_knn
from scipy.integrate import quad
from scipy.stats import laplace, norm

from pl_privknn.cli.main import main
from pl_privknn.labelers import FixedThresholds, Screening
from pl_privknn.planning import plan
from pl_privknn.planning.utility import chances, hopeless, utility_of_attributes, utility_of_votes
from pl_privknn.privacy.mechanisms import DiscreteGaussian, ExponentialArgmax, Gaussian, Laplace
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger


def wins(distribution, votes):
    """P(the first count plus noise is the largest), by its integral."""

    def at(x):
        value = distribution.pdf(x)
        for other in votes[1:]:
            value *= distribution.cdf(x + votes[0] - other)
        return value

    return quad(at, -40 * distribution.std(), 40 * distribution.std(), limit=400, points=[0])[0]


@pytest.mark.parametrize(
    ("noise", "distribution"),
    [
        (Gaussian(12.0), norm(scale=12.0)),
        (Laplace(5.0), laplace(scale=5.0)),
        (DiscreteGaussian(12.0), norm(scale=12.0)),
    ],
)
def test_chances_are_those_of_the_integral(noise, distribution):
    # 10,000 draws: a standard error of 0.005, and four of them for each of nine comparisons.
    for found in utility_of_votes(noise, 10, 60)[:3]:
        votes = [round(60 * found.share), 60 - round(60 * found.share)] + [0] * 8
        assert found.right == pytest.approx(wins(distribution, votes), abs=0.02)
        assert found.lead == votes[0] - votes[1]
        assert found.passes == 1


def test_screening_and_exponential_argmax_in_closed_form():
    for found in utility_of_votes(ExponentialArgmax(10.0), 4, 50, Screening(threshold=36, sigma=9.0)):
        most = round(50 * found.share)
        assert found.passes == pytest.approx(norm.sf((36 - max(most, 50 - most)) / 9), abs=0.02)
        weights = torch.tensor([most, 50 - most, 0, 0]) / 10
        assert found.right == pytest.approx(float(weights.softmax(0)[0]), abs=0.02)


def test_chances_count_the_right_class_wherever_it_stands():
    votes = torch.tensor([[0, 90, 10], [90, 0, 10]])
    _, right = chances(Gaussian(1.0), votes, torch.tensor([1, 1]), draws=100)
    assert right.tolist() == [1.0, 0.0]


def test_a_plan_of_ind_knn_states_it_for_assumed_neighbours():
    found = plan("ind-knn", delta=1e-5, budget=0.05, sigma2=2.0, neighbors=64, exact=False).utility
    for case in found[:3]:  # deviation 2 · √64, two classes
        assert case.right == pytest.approx(
            wins(norm(scale=16.0), [32 + case.lead / 2, 32 - case.lead / 2]), abs=0.02
        )
    # Twice as many neighbours agree by twice as many votes, and the noise grows by √2 alone.
    more = plan("ind-knn", delta=1e-5, budget=0.05, sigma2=2.0, neighbors=128, exact=False).utility
    assert more[2].right > found[2].right + 0.03


@pytest.mark.parametrize("ones", [1, 5])
def test_attributes_are_answered_as_the_teacher_itself_answers(ones):
    # 60 equal records, of which 45 have the first of ten attributes and as many more as make `ones`.
    labels = torch.zeros(60, 10, dtype=torch.int64)
    labels[:45, :ones] = 1
    teacher = attribute_knn(
        k=60,
        sampling_rate=1.0,
        tau=3.0,
        noise=Gaussian(sigma=18.0),
        rule=FixedThresholds(expected_positives=float(ones)),
        noise_source=SeededNoise(1),
    )
    teacher.fit(torch.zeros(60, 2), labels, 10)
    said = teacher.label(torch.zeros(8_000, 2), FreeLedger()).labels[:, 0]
    found = utility_of_attributes(teacher.plan(1, 1, 10)[0].mechanism, 60, 3.0, float(ones))[1]
    assert (found.share, found.lead, found.passes, found.of) == (0.75, 30, 1.0, "attributes")
    # 8,000 and 10,000 draws: four standard errors of the difference.
    assert found.right == pytest.approx(float(said.double().mean()), abs=0.03)
    cut = min(3 / ones, 1)
    assert found.right == pytest.approx(norm.cdf(cut * 15 / 18), abs=0.02)


def test_attributes_of_reverse_knn_are_refused_and_answered_as_by_the_teacher_itself():
    # 20 records at each query, all of them with two of ten attributes; queries far from one another.
    places = torch.arange(4_000).float()[:, None].expand(-1, 2) * 100
    labels = torch.zeros(80_000, 10, dtype=torch.int64)
    labels[:, :2] = 1
    teacher = attribute_reverse_knn(
        tau=1.0,
        noise=Laplace(scale=8.0),
        rule=FixedThresholds(expected_positives=2.0),
        abstain=1.0,
        noise_source=SeededNoise(1),
    )
    teacher.fit(places.repeat_interleave(20, 0), labels, 10)
    said = teacher.label(places, FreeLedger()).labels[:, 0]
    found = utility_of_attributes(teacher.mechanism(10), None, 1.0, 2.0, abstain=1.0)[1]
    assert (found.share, found.lead) == (None, 20)
    answered = said[said >= 0]
    assert found.passes == pytest.approx(len(answered) / 4_000, abs=0.04)
    assert found.right == pytest.approx(float(answered.double().mean()), abs=0.04)
    assert 0.6 < found.right < 0.9
    assert 0.7 < found.passes < 0.95


def test_plans_of_attributes_state_it_and_the_guess_that_it_rests_on():
    wanted = {"delta": 1e-5, "epsilon": 1.0, "exact": False, "num_classes": 10}
    answers = {"queries": 1000, "sampling_rate": 0.15, "k": 300}
    whole = plan("multilabel-knn", **answers, **wanted)
    cut = plan("multilabel-knn", expected_positives=9, **answers, **wanted)
    assert whole.parameters == cut.parameters
    assert cut.utility[1].right < whole.utility[1].right - 0.1
    assert "expected_positives: 9" in cut.yaml()
    assert "rule" not in whole.yaml()
    teachers = plan("multilabel-pate", num_teachers=40, queries=500, **wanted)
    assert "hopeless: of attributes on which 90 % agree" in hopeless(teachers.utility)[0]
    table = plan("multilabel-reverse-knn", rounds=1, expected_positives=2, **wanted)
    assert [found.lead for found in table.utility] == [50, 20, 10, 5]
    assert str(table.utility[-1]).startswith("an attribute, 5 votes ahead: passes ")
    assert "denoise: true" in table.yaml()


def test_plans_state_it_and_warn_where_they_are_hopeless(capsys):
    useful = plan(
        "private-knn",
        delta=1e-5,
        epsilon=1.0,
        exact=False,
        k=200,
        sampling_rate=0.1,
        queries=60,
        screening=False,
    )
    assert useful.utility[0].right > 0.99
    assert not hopeless(useful.utility)
    # The screening of 40 votes at such noise was planned without a word.
    words = [
        "plan",
        "private-knn",
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
        "--k",
        "40",
        "--sampling-rate",
        "1",
        "--queries",
        "80",
    ]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["share"] for entry in told["utility"]] == [0.9, 0.75, 0.6, 0.5]
    assert "hopeless" in told["warnings"][0]
    assert "screening" in told["warnings"][1]
    tiny = plan("private-knn", delta=1e-5, epsilon=1e-6, exact=False, k=40, sampling_rate=0.1, queries=10)
    assert "hopeless" in hopeless(tiny.utility)[0]
    table = plan("reverse-knn", delta=1e-5, epsilon=1e-3, rounds=1, exact=False)
    assert "votes ahead" in hopeless(table.utility)[0]
    assert plan("class-sums", delta=1e-5, epsilon=1.0, rounds=1, exact=False).utility == ()
