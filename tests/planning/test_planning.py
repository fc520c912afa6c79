"""One setting of a configuration, found for an ε: against closed forms, and the cost that configurations state."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import yaml

import pl_privknn.labelers as labelers
from pl_privknn.callbacks import FullSelection
from pl_privknn.cli import main
from pl_privknn.config import ConfigurationError, get, put, read_document
from pl_privknn.planning import default_parameter, parameter_of, plan_of, planned_steps, solve
from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.accountant import account, epsilon_for_delta
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.training import PrivateTraining

CONFIGS = Path(__file__).parents[2] / "configs"
#: Configurations without private data.
PUBLIC_ALONE = {"digits_simclr", "fashion_mnist_simclr", "fashion_mnist_attributes_nonprivate"}
#: Those of papers with a labeler: test_papers_configs.py.
STATED = [
    *(path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.startswith("compare_")),
    *sorted(CONFIGS.glob("papers/*noisy_sgd*.yaml")),
]


def made(class_path, **init_args):
    return {"class_path": class_path, "init_args": init_args}


GAUSSIAN = made("Gaussian", sigma=9.0)
REPLACED = {"delta": 1e-5, "adjacency": "replace_one"}


def labeling(labeler, arguments, **more):
    """A fragment that asks 40 queries of a teacher."""
    section = {"labeler": made(labeler, **arguments), "queries_per_round": 40, **more}
    return {"labeling": {"budget": {"delta": 1e-5}, **section}}


def training(arguments, **trainer):
    """A training of any module."""
    batches = {"expected_batch_size": 100, "private_records": 1000}
    epsilon = {name: value for name, value in arguments.items() if name == "epsilon"}
    others = {name: value for name, value in arguments.items() if name != "epsilon"}
    callback = made("PrivateTraining", budget={"delta": 1e-5, **epsilon}, **others, **batches)
    return {"model": {"class_path": "their.Module"}, "trainer": {"callbacks": [callback], **trainer}}


SCREENED = {"k": 30, "screening": {"threshold": 18, "noise": {"sigma": 18.0}}, "noise": GAUSSIAN}
SHUFFLED = {"num_clients": 1000, "budget": {**REPLACED, "epsilon": 2.0}}
TWO_RELEASES = {"releases": 2, "noise_multiplier": 9.0}
ALL_QUERIES = {"selection": FullSelection()}
OF_RUN, OF_LABELER = "labeling.budget.epsilon", "labeling.labeler.init_args."
#: A configuration of every teacher and private training, and where its free parameter is.
DOCUMENTS = {
    "PrivateKNN": (labeling("PrivateKNN", SCREENED), f"{OF_LABELER}noise.init_args.sigma"),
    "PATE": (
        labeling("PATE", {"num_teachers": 50, "noise": made("Laplace", scale=9)}),
        f"{OF_LABELER}noise.init_args.scale",
    ),
    "ReverseKNN": (labeling("ReverseKNN", {}), OF_RUN),
    "LocalReverseKNN": (labeling("LocalReverseKNN", {}, budget=REPLACED), OF_RUN),
    "ShuffledReverseKNN": (
        labeling("ShuffledReverseKNN", SHUFFLED, budget=REPLACED),
        f"{OF_LABELER}budget.epsilon",
    ),
    "IndKNN": (labeling("IndKNN", {"threshold": 0.5, "noise": {"sigma": 1.0}}), OF_RUN),
    "NoisySGDTeacher": (
        labeling("NoisySGDTeacher", {"noise_multiplier": 2.0}, **ALL_QUERIES),
        f"{OF_LABELER}noise_multiplier",
    ),
    "SufficientStatistics": (labeling("SufficientStatistics", {}), OF_RUN),
    "PreconditionedGradients": (
        labeling("PreconditionedGradients", TWO_RELEASES, **ALL_QUERIES),
        f"{OF_LABELER}noise_multiplier",
    ),
    "PrivateTraining": (
        training({"noise_multiplier": 3.0}, max_epochs=2),
        "trainer.callbacks.0.init_args.noise_multiplier",
    ),
}


def test_every_labeler_has_a_free_parameter():
    found = {
        name
        for name in labelers.__all__
        if inspect.isclass(cls := getattr(labelers, name))
        and issubclass(cls, labelers.Labeler)
        and not inspect.isabstract(cls)
    }
    assert found == DOCUMENTS.keys() - {"PrivateTraining"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_free_parameter_is_found_and_its_configuration_costs_that(name):
    document, path = DOCUMENTS[name]
    assert default_parameter(document) == path
    plan = solve(document, None, 1.0, source="here", num_classes=10, exact=False)
    assert plan.found == path
    assert 0.99 < plan.epsilon <= 1.0
    stated = plan_of(plan.document, "here", num_classes=10)
    assert stated.charges == plan.charges
    assert (
        account(stated.charges, delta=1e-5, adjacency=stated.adjacency, exact=False).epsilon == plan.epsilon
    )
    assert get(document, path) != get(plan.document, path) == plan.values[path]


def test_the_noise_of_a_screening_follows_that_of_the_answers():
    def found(document, path=None, **more):
        return solve(document, path, 1.0, source="here", num_classes=10, exact=False, **more).values

    document, sigma = DOCUMENTS["PrivateKNN"]
    place = "labeling.labeler.init_args.screening.noise.sigma"
    values = found(document)
    assert values == {sigma: values[sigma], place: pytest.approx(2 * values[sigma], rel=1e-5)}
    assert found(document, sigma).keys() == {sigma}
    values = found(document, tied={place: 3.0})
    assert values[place] == pytest.approx(3 * values[sigma], rel=1e-5)
    confident = {"screening": {"threshold": 30, "noise": {"sigma": 20}}, "noise": made("Gaussian", sigma=8)}
    values = found(labeling("PATE", {"num_teachers": 50, **confident}))
    assert values[place] == pytest.approx(2.5 * values[sigma], rel=1e-5)


def test_a_number_of_queries_is_the_largest_that_fits():
    document = labeling("PrivateKNN", {"k": 30, "sampling_rate": 0.3, "noise": GAUSSIAN})
    path = "labeling.queries_per_round"
    plan = solve(document, path, 1.0, source="here", num_classes=10)
    count = plan.values[path]
    assert isinstance(count, int)
    more = [Charge(plan.charges[0].mechanism, count + 1)]
    assert plan.epsilon <= 1.0 < epsilon_for_delta(more, 1e-5)
    rounds = labeling("PrivateKNN", {"noise": GAUSSIAN}, rounds=2, queries_per_round=[20, 20])
    assert parameter_of(rounds, "labeling.queries_per_round.1").whole


@pytest.mark.parametrize("path", STATED, ids=lambda path: path.stem)
def test_every_configuration_that_fixes_its_cost_states_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no data
    document = read_document(path)
    if path.stem in PUBLIC_ALONE:
        with pytest.raises(ValueError, match="no privacy cost"):
            plan_of(document, path)
        return
    stated = plan_of(document, path)
    epsilon = account(stated.charges, delta=stated.delta, adjacency=stated.adjacency, exact=False).epsilon
    assert 0 < epsilon < math.inf
    model = document["model"]
    if model["class_path"] == "NoisySGD":  # it states its own target
        target = get(model, "init_args.budget.epsilon")
        assert 0.99 * target < epsilon <= target


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ({}, 200),
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": None, "max_steps": 70}, 70),
        ({"max_epochs": None}, 10_000),
        ({"max_epochs": 2, "limit_train_batches": 4}, 8),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 10),
    ],
)
def test_steps_are_those_of_the_trainer(trainer, steps):
    assert planned_steps(trainer, 10) == steps
    if steps <= 200:
        (charge,) = plan_of(training({"noise_multiplier": 3.0}, **trainer), "here").charges
        assert charge == Charge(Gaussian(3.0, 1.0, 0.1), steps)


def test_plans_of_trainings_and_of_all_public_examples():
    callback = PrivateTraining(budget=Budget(epsilon=1.0), expected_batch_size=100, private_records=1000)
    stated = plan_of(training({"epsilon": 1.0}, max_epochs=2), "here")
    assert list(stated.charges) == callback.plan(2 * 10)
    assert 0.995 < epsilon_for_delta(stated.charges, 1e-5) <= 1.0
    stated = plan_of(training({"noise_multiplier": 3.0, "epsilon": 0.5}), "here")  # it ends at its ε
    assert 0.45 < epsilon_for_delta(stated.charges, 1e-5) <= 0.5
    assert stated.charges[0].count < 200
    seeded = made("pl_privknn.privacy.noise.SeededNoise", seed=1)
    stated = plan_of(training({"noise_multiplier": 3.0, "options": {"noise_source": seeded}}), "here")
    assert {charge.guarantee.level for charge in stated.charges} == {"none"}
    asked = labeling("PrivateKNN", {"noise": GAUSSIAN}, selection=FullSelection(), rounds=2)
    data = made("DigitsDataModule", public_examples=90)
    (charge,) = plan_of({**asked, "data": data}, "here").charges
    assert charge.count == 180


@pytest.mark.parametrize(
    ("document", "match"),
    [
        (training({"noise_multiplier": 3.0}, max_epochs=-1), "max_epochs=-1"),
        (
            {**training({"noise_multiplier": 3.0}), **labeling("PrivateKNN", {})},
            "trainer.callbacks.0 trains on the private records",
        ),
        ({"model": {"class_path": "VATStudent"}}, "no privacy cost"),
        (labeling("PrivateKNN", {}, selection=FullSelection()), "there is no data section"),
        (labeling("os.system", {}), "os.system"),
        (labeling("NoSuch", {}), "NoSuch"),
    ],
)
def test_configurations_that_say_too_little_are_refused(document, match):
    with pytest.raises(ValueError, match=match):
        plan_of(document, "here", num_classes=10)
    with pytest.raises(ConfigurationError, match="trainer=3: expected a section"):
        planned_steps(3, 10)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(DOCUMENTS["PrivateKNN"][0]))
    return str(path)


def test_the_command_prints_what_was_found_and_how_to_run_it(file, tmp_path, capsys):
    words = ["plan", file, "--epsilon", "1", "--num-classes", "10"]
    assert main([*words, "--set", "labeling.queries_per_round=20", "--set", "labeling.max_answers=9"]) == 0
    printed, told = capsys.readouterr()
    sigma = next(line.split()[1] for line in printed.splitlines() if "noise.init_args.sigma " in line)
    for change in ("queries_per_round=20", "labeling.max_answers=9", f"noise.init_args.sigma={sigma}"):
        assert change in told.splitlines()[-1]
    assert main([*words, "--json", "--find", "labeling.queries_per_round"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["values"] == {"labeling.queries_per_round": report["records"][0]["count"]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(report))
    assert main(["epsilon", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == report["epsilon"] <= 1.0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--epsilon", "1", "--low", "9", "--high", "8"], "low=9 must be below high=8"),
        (["--epsilon", "1", "--low", "inf"], "low=inf"),
        (["--epsilon", "1", "--find", "labeling.nothing"], "nothing"),
        (["--epsilon", "1", "--find", "nothing"], "nothing"),
        (["--epsilon", "1e-9", "--set", "labeling.budget.delta=1e-290"], "can't be met"),
        (["--epsilon", "1", "--set", "labeling.queries_per_round=1000000000000000"], "at most 1000000000"),
        (["--epsilon", "1", "--set", "labeling.rounds"], "--set 'labeling.rounds' must be PATH=VALUE"),
        (["--epsilon", "1", "--set", "labeling.labeler.init_args.noise=null"], "noise is not stated"),
    ],
)
def test_absurd_words_end_in_one_line(words, named, file, capsys):
    assert main(["plan", file, "--num-classes", "10", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_the_page_on_accounting_quotes_what_is_computed():
    page = (CONFIGS.parent / "docs" / "methods" / "accounting.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)account\(releases", page, flags=re.DOTALL)
    scope: dict = {}
    exec(code[1], scope)
    report = scope["account"](scope["releases"], delta=1e-5, exact=False).to_dict()
    for name in ("epsilon_rdp_classic", "epsilon_rdp", "epsilon_pld"):
        quoted = re.search(rf"\| `{name}` \| ([\d.]+) \|", page)
        assert float(quoted[1]) == pytest.approx(report[name], abs=6e-5), name
    # The planned configuration costs what the page says.
    printed = dict(re.findall(r"^([\w.]+) {2,}([\d.]+)$", page, flags=re.MULTILINE))
    document = read_document(CONFIGS / "fashion_mnist_private_knn.yaml")
    for name in ("noise.init_args.sigma", "screening.noise.sigma"):
        place = f"labeling.labeler.init_args.{name}"
        put(document, place, float(printed[place]))
    found = account(plan_of(document, "here").charges, delta=1e-5, exact=False).epsilon_pld
    assert float(printed["epsilon_pld"]) == pytest.approx(found, rel=1e-5)  # six digits, rounded up


def test_a_run_promises_what_its_configuration_states(tmp_path, capsys):
    run, words = tmp_path / "run", ["--trainer.max_epochs", "2", "--trainer.limit_train_batches", "3"]
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    config = str(CONFIGS / "digits_noisy_sgd.yaml")
    assert main(["fit", "--config", config, *words, *quiet, "--run_dir", str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    capsys.readouterr()
    assert main(["epsilon", str(run / "config.yaml"), "--json"]) == 0
    stated = json.loads(capsys.readouterr().out)
    assert summary["steps_planned"] == 6
    assert stated["epsilon"] == pytest.approx(summary["epsilon"], rel=1e-9)
    assert (stated["delta"], stated["guarantee"]) == (summary["delta"], summary["guarantee"])
