import inspect
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from scipy import stats
from scipy.optimize import brentq

import pl_privknn.labelers as labelers
import pl_privknn.privacy.mechanisms  # noqa: F401 - YAML names its classes without a module path
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.cli.main import main
from pl_privknn.planning import (
    TEACHERS,
    plan,
    plan_noisy_sgd,
    plan_private_knn,
    plan_release,
    plan_reverse_knn,
)
from pl_privknn.privacy.accounting.accountant import account, epsilon_for_delta
from pl_privknn.privacy.accounting.calibration import CalibrationError, Parameter, calibrate
from pl_privknn.privacy.mechanisms import Charge, Gaussian, Laplace

NOISE = Parameter("sigma", start=1.0, low=0.05, high=1e6, rising=False)


def literal_gaussian_epsilon(mu, delta):
    """Balle and Wang (2018), Theorem 8."""

    def excess(eps):
        first = stats.norm.cdf(mu / 2 - eps / mu)
        return first - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu) - delta

    return brentq(excess, 0, 200)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-6), (8.0, 1e-3)])
@pytest.mark.parametrize("count", [1, 50])
def test_gaussian_noise_is_that_of_the_closed_form(epsilon, delta, count):
    found = calibrate(lambda s: [Charge(Gaussian(s), count)], NOISE, epsilon=epsilon, delta=delta)
    mu = math.sqrt(count) / found.value
    assert 0.998 * epsilon < literal_gaussian_epsilon(mu, delta) <= epsilon * (1 + 1e-9)
    assert found.report.epsilon <= epsilon


def test_laplace_noise_is_the_pure_one_as_delta_vanishes():
    plan = plan_release(epsilon=0.5, delta=1e-12, noise="laplace", sensitivity=2.0, count=3)
    assert plan.parameters["noise_scale"] == pytest.approx(3 * 2 / 0.5, rel=2e-3)
    assert plan.epsilon <= 0.5


def test_noisy_sgd_agrees_with_opacus():
    from opacus.accountants.utils import get_noise_multiplier

    plan = plan_noisy_sgd(epsilon=2.0, delta=1e-5, records=10_000, batch_size=250, epochs=10)
    assert plan.parameters["steps"] == 400
    theirs = get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=0.025, steps=400, accountant="prv"
    )
    assert plan.parameters["noise_multiplier"] == pytest.approx(theirs, rel=0.01)


def test_steps_cover_every_epoch():
    plan = plan_noisy_sgd(delta=1e-5, records=1000, batch_size=300, epochs=2, noise_multiplier=2.0)
    assert plan.parameters["steps"] == 7  # 2 / 0.3, rounded up
    assert plan.target is None


def test_the_number_found_is_the_largest():
    plan = plan_release(epsilon=1.0, delta=1e-5, noise_scale=30.0, count=None, sampling_rate=0.3)
    count = plan.parameters["count"]
    at, after = ([Charge(Gaussian(30.0, 1.0, 0.3), n)] for n in (count, count + 1))
    assert epsilon_for_delta(at, 1e-5) <= 1.0 < epsilon_for_delta(after, 1e-5)


def test_the_sampling_rate_found_is_the_largest():
    plan = plan_release(epsilon=1.0, delta=1e-5, noise_scale=5.0, count=200, sampling_rate=None)
    rate = plan.parameters["sampling_rate"]
    more = [Charge(Gaussian(5.0, 1.0, 1.01 * rate), 200)]
    assert plan.epsilon <= 1.0 < epsilon_for_delta(more, 1e-5)


def test_a_limit_that_meets_the_target_is_the_answer():
    plan = plan_release(epsilon=5.0, delta=1e-5, noise_scale=50.0, count=2, sampling_rate=None)
    assert plan.parameters["sampling_rate"] == 1.0


@settings(max_examples=15, deadline=None)
@given(
    epsilon=st.floats(0.05, 10),
    log_delta=st.floats(-12, -2),
    count=st.integers(1, 500),
    laplace=st.booleans(),
)
def test_the_target_is_never_passed(epsilon, log_delta, count, laplace):
    def charges(scale):
        return [Charge(Laplace(scale) if laplace else Gaussian(scale), count)]

    found = calibrate(charges, NOISE, epsilon=epsilon, delta=10**log_delta)
    assert 0.99 * epsilon < found.report.epsilon <= epsilon
    assert account(charges(found.value), delta=10**log_delta, exact=False).epsilon <= epsilon


def test_more_epsilon_needs_no_more_noise():
    scales = [
        plan_private_knn(
            epsilon=eps, delta=1e-5, k=20, queries=50, sampling_rate=0.3, max_answers=30, exact=False
        ).parameters["noise_scale"]
        for eps in (0.5, 1.0, 2.0)
    ]
    assert scales == sorted(scales, reverse=True)


def test_an_epsilon_that_goes_both_ways_is_refused():
    def charges(x):
        return [Charge(Gaussian(1.0 + 3.0 * abs(math.log(x / 6.0))))]

    with pytest.raises(CalibrationError, match=r"ε does not fall with sigma"):
        calibrate(charges, NOISE, epsilon=0.5, delta=1e-5)


def test_a_target_out_of_reach_says_so():
    with pytest.raises(CalibrationError, match=r"epsilon=0\.1 can't be met: count=1, the smallest"):
        plan_release(epsilon=0.1, delta=1e-5, noise_scale=1.0)


KNN = {"delta": 1e-5, "k": 30, "num_classes": 5}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"epsilon": 1.0, "queries": 10}, "leave out exactly one"),
        ({"epsilon": -1.0, "queries": 10, "sampling_rate": 0.1}, "epsilon=-1.0"),
        ({"epsilon": 1.0, "queries": 0, "sampling_rate": 0.1}, "queries=0"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 1.5}, "sampling_rate=1.5"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "threshold": 31}, "threshold=31"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "max_answers": 0}, "max_answers=0"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "answer_share": 2.0}, "answer_share=2.0"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "noise": "uniform"}, "noise='uniform'"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "rounds": 11}, "rounds=11"),
        ({"queries": 10, "sampling_rate": 0.1}, "epsilon=None, noise_scale=None"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "delta": 1.0}, "delta=1.0"),
        ({"epsilon": 1.0, "queries": 10, "sampling_rate": 0.1, "k": 0}, "k=0"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        plan_private_knn(**{**KNN, "exact": False, **arguments})


def callback_of(text):
    """What ``privknn fit`` would make of the ``labeling`` section."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PrivateLabeler, "labeling")
    return parser.instantiate_classes(parser.parse_string(text)).labeling


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"noise": "exponential_argmax", "rounds": 3},
        {"noise": "laplace", "screening": False},
        {"noise": "discrete_gaussian", "threshold": 17.5, "sigma_ratio": 2.0},
    ],
    ids=["gaussian", "argmax", "laplace", "discrete"],
)
def test_the_configuration_charges_what_was_planned(arguments):
    queries = {"queries": 40, "max_answers": 25, "sampling_rate": 0.3}
    plan = plan_private_knn(epsilon=2.0, exact=False, **KNN, **queries, **arguments)
    callback = callback_of(plan.yaml())
    assert isinstance(callback.labeler, labelers.PrivateKNN)
    assert sum(callback.queries_per_round) == 40
    assert callback.delta == 1e-5
    assert callback.max_epsilon == 2.0
    assert callback.labeler.plan(40, callback.max_answers, 5) == list(plan.charges)


@pytest.mark.parametrize(
    "arguments", [{"noise": "laplace"}, {"noise": "discrete_gaussian", "adjacency": "replace_one", "k": 2}]
)
def test_the_configuration_of_reverse_knn_charges_what_was_planned(arguments):
    plan = plan_reverse_knn(epsilon=1.0, delta=1e-6, rounds=3, **arguments)
    callback = callback_of(plan.yaml())
    assert callback.labeler.plan(10, 10, 2, rounds=callback.rounds) == list(plan.charges)
    assert callback.adjacency == plan.report.adjacency


SMALL = {
    "private-knn": {"queries": 40, "sampling_rate": 0.3, "k": 30},
    "private-radius": {"queries": 40, "sampling_rate": 0.3, "max_votes": 20, "threshold": 9.0},
    "pate": {"queries": 40, "num_teachers": 50, "noise": "laplace"},
    "multilabel-knn": {"queries": 40, "sampling_rate": 0.3, "k": 30, "num_classes": 6, "max_answers": 9},
    "multilabel-pate": {"queries": 40, "num_teachers": 50, "num_classes": 6, "tau": 2.0},
    "reverse-knn": {"noise_scale": 9.0},
    "multilabel-reverse-knn": {"rounds": 2, "num_classes": 6, "adjacency": "replace_one"},
    "ind-knn": {"queries": 300},
    "noisy-sgd-teacher": {"steps": 50, "sampling_rate": 0.1, "rounds": 2},
    "soft-votes": {"adjacency": "replace_one"},
    "public-curvature": {"releases": 4, "adjacency": "replace_one"},
}


def test_no_labeler_is_left_out():
    found = {name for name in labelers.__all__ if inspect.isclass(cls := getattr(labelers, name))
             and issubclass(cls, labelers.Labeler) and not inspect.isabstract(cls)}  # fmt: skip
    assert found == {row.title for name, row in TEACHERS.items() if name not in ("release", "noisy-sgd")}


@pytest.mark.parametrize("teacher", [name for name in TEACHERS if name not in ("release", "noisy-sgd")])
def test_every_labeler_can_be_planned_and_its_configuration_charges_that(teacher):
    found = plan(teacher, epsilon=1.0, delta=1e-5, exact=False, **SMALL.get(teacher, {}))
    assert found.found is not None
    assert found.epsilon <= 1.0
    if found.found != "rounds":
        assert found.epsilon > 0.995
    callback = callback_of(found.yaml())
    queries = sum(callback.queries_per_round)
    answers = callback.max_answers or queries
    classes = SMALL.get(teacher, {}).get("num_classes", 10)
    charges = callback.labeler.plan(queries, answers, classes, rounds=callback.rounds)
    assert charges == list(found.charges)
    total = account(charges, delta=1e-5, adjacency=callback.adjacency, exact=False)
    assert total.epsilon == pytest.approx(found.epsilon, rel=1e-12)


def test_plans_of_gaussian_teachers_are_those_of_the_closed_form():
    pate = plan("pate", epsilon=1.0, delta=1e-5, queries=30, screening=False, exact=False)
    mu = math.sqrt(2 * 30) / pate.parameters["noise_scale"]
    assert 0.998 < literal_gaussian_epsilon(mu, 1e-5) <= 1.0
    stream = plan("ind-knn", epsilon=1.0, delta=1e-5, exact=False)
    # The largest budget that Gaussian DP admits at ε = 1 and δ = 1e-5.
    assert stream.parameters["budget"] == pytest.approx(0.03593, rel=2e-3)
    assert literal_gaussian_epsilon(math.sqrt(2 * stream.parameters["budget"]), 1e-5) <= 1.0


def test_the_exact_search_needs_less_noise_for_the_same_epsilon():
    arguments = {"queries": 200, "sampling_rate": 1.0, "max_answers": 1, **KNN, "epsilon": 2.0}
    fast = plan_private_knn(**arguments)
    exact = plan_private_knn(**arguments, exact_search=True)
    assert exact.parameters["noise_scale"] < 0.99 * fast.parameters["noise_scale"]
    assert 0.998 * 2.0 < exact.report.epsilon_exact <= 2.0
    assert exact.report.epsilon_pld > 2.0


def test_a_plan_with_everything_given_states_what_the_paper_s_run_costs():
    plan = plan_private_knn(
        delta=1e-5, noise_scale=25.0, queries=2000, sampling_rate=0.15, max_answers=735, exact=False
    )
    assert plan.parameters["threshold"] == 180
    assert plan.parameters["screening_sigma"] == 75
    assert plan.report.epsilon_rdp_classic == pytest.approx(1.190, abs=5e-4)
    assert plan.report.epsilon_pld == pytest.approx(0.916, abs=1e-3)


def test_the_curve_passes_through_the_plan_and_rises():
    plan = plan_private_knn(epsilon=1.0, queries=60, sampling_rate=0.3, answer_share=0.5, exact=False, **KNN)
    curve = dict(plan.curve(8))
    assert curve[60] == pytest.approx(plan.epsilon)
    ordered = [curve[count] for count in sorted(curve)]
    assert ordered == sorted(ordered)
    assert max(curve) == 120


COMMAND = "plan private-knn --epsilon 1 --delta 1e-5 --k 30 --num-classes 5 --sampling-rate 0.3 --queries 40"


def test_the_command_prints_a_table_and_its_configuration(tmp_path, capsys):
    plot = tmp_path / "plan.svg"
    assert main([*COMMAND.split(), "--answers", "25", "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    found = callback_of(printed)  # table lines are comments, so all of it is configuration
    assert found.max_answers == 25
    assert any("noise_scale" in line and "found" in line for line in printed.splitlines())
    assert plot.read_text().startswith("<?xml")


def test_the_command_prints_json_whose_records_cost_what_it_says(tmp_path, capsys):
    assert main([*COMMAND.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    path = tmp_path / "records.json"
    path.write_text(json.dumps(report["records"]))
    assert main(["epsilon", str(path), "--delta", "1e-5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == report["epsilon"] <= 1.0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("release --count 10 --noise discrete_laplace", "noise_scale"),
        ("release --count 10 --noise-scale 9", "sampling_rate"),
        ("release --noise-scale 90 --adjacency replace_one", "count"),
        ("noisy-sgd --records 1000 --batch-size 100 --noise-multiplier 3", "epochs"),
        ("reverse-knn --noise-scale 9", "rounds"),
        ("pate --teachers 50 --queries 20 --no-screening", "noise_scale"),
        ("multilabel-knn --num-attributes 6 --k 20 --sampling-rate 0.3 --noise-scale 40", "queries"),
        ("ind-knn", "budget"),
    ],
)
def test_the_command_finds_what_was_left_out(words, found, capsys):
    assert main(["plan", *words.split(), "--epsilon", "1", "--delta", "1e-5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["found"] == found
    assert report["epsilon"] <= 1.0


def test_one_setting_of_any_configuration_is_found(tmp_path, capsys):
    path = tmp_path / "pate.yaml"
    aggregator = "{class_path: GNMAX, init_args: {sigma: 5}}"
    labeler = f"{{class_path: PATE, init_args: {{num_teachers: 50, aggregator: {aggregator}}}}}"
    path.write_text(f"labeling: {{budget: {{delta: 1e-5}}, queries_per_round: 30, labeler: {labeler}}}")
    place = "labeling.labeler.init_args.aggregator.init_args.sigma"
    words = ["plan", "config", str(path), "--find", place, "--epsilon", "1", "--num-classes", "10"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    sigma = callback_of(printed).labeler.aggregator.noise.sigma
    assert 0.998 < literal_gaussian_epsilon(math.sqrt(2 * 30) / sigma, 1e-5) <= 1.0
    assert main([*words, "--low", "9", "--high", "8"]) == 2
    assert "low=9 must be below high=8" in capsys.readouterr().err


def test_the_command_names_what_is_wrong(capsys):
    assert main([*COMMAND.split(), "--answers", "0"]) == 2
    assert "max_answers=0" in capsys.readouterr().err


def test_the_page_on_accounting_quotes_what_is_computed():
    page = (Path(__file__).resolve().parents[3] / "docs" / "methods" / "accounting.md").read_text(
        encoding="utf-8"
    )
    code = re.search(r"```python\n(.*?)account\(releases", page, flags=re.DOTALL)
    scope: dict = {}
    exec(code[1], scope)
    report = scope["account"](scope["releases"], delta=1e-5, exact=False).to_dict()
    for name in ("epsilon_rdp_classic", "epsilon_rdp", "epsilon_pld"):
        quoted = re.search(rf"\| `{name}` \| ([\d.]+) \|", page)
        assert float(quoted[1]) == pytest.approx(report[name], abs=6e-5), name
    # The planned configuration costs what the page says.
    printed = re.search(r"# PrivateKNN\n.*?\nlabeling:.*?(?=```)", page, flags=re.DOTALL)[0]
    callback = callback_of(printed)
    charges = callback.labeler.plan(2000, callback.max_answers, 10)
    stated = re.search(r"# epsilon_pld +([\d.]+)", printed)
    assert float(stated[1]) == pytest.approx(epsilon_for_delta(charges, 1e-5, method="pld"), abs=1e-6)
