"""The YAML of a comparison: what is refused, and what fairness makes of it."""

import math
from pathlib import Path

import pytest

from pl_privknn.comparison.run import Planner, runs_of, with_run_settings
from pl_privknn.comparison.runner import choose
from pl_privknn.comparison.spec import comparison_of, read_comparison
from pl_privknn.config import ConfigurationError, get, put
from tests.comparison.compare_documents import KNN, REVERSE, SGD, SIGMA, document


def changed(path, value):
    whole = document()
    put(whole, path, value)
    return whole


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("metods", [], ["unknown key 'metods'", "methods"]),
        ("methods.knn.labelling", {}, ["unknown key 'labelling'", "methods[0]"]),
        ("epsilons", [0], ["ε=0", "above 0"]),
        ("epsilons", [-1, 2], ["ε=-1"]),
        ("epsilons", ["much"], ["ε='much'"]),
        ("epsilons", [1, 1.0], ["twice"]),
        ("epsilons", [], ["epsilons=[]"]),
        ("seeds", [1.5], ["seeds=1.5"]),
        ("adjacency", "both", ["adjacency='both'"]),
        ("methods", [], ["methods=[]"]),
        ("base.data", {"init_args": {}}, ["base.data", "class_path"]),
        ("wandb", {"project": "p", "mode": "sometimes"}, ["wandb.mode"]),
        ("seeds", [3, 3], ["twice"]),
        ("delta", 1, ["delta=1"]),
        ("noise_seeded", "yes", ["noise_seeded='yes'"]),
        ("name", "a/b", ["name='a/b'", "folder"]),
        ("methods", [KNN, KNN], ["'knn' occurs twice"]),
        ("methods.knn.model", SGD["model"], ["labeling and model", "exactly one"]),
        ("methods.knn.trainer", {"max_epochs": 50}, ["methods.knn.trainer", "share"]),
        ("methods.knn.student", {"class_path": "VATStudent"}, ["unknown key 'student'"]),
        ("methods.knn.labeling.delta", 1e-3, ["delta", "same for all methods"]),
        ("methods.knn.labeling.labeler.init_args.noise_source", {}, ["noise_source"]),
        ("methods.sgd.model.init_args.delta", 1e-3, ["methods.sgd.model", "delta"]),
        ("methods.knn.settings", {"1": {"data.init_args.batch_size": 4}}, ["data.init_args.batch_size", "shared"]),
        ("methods.knn.settings", {"1": {"model.init_args.lr": 4}}, ["model.init_args.lr"]),
        ("methods.knn.find", "labeling.delta", ["labeling.delta"]),
        ("methods.knn.labeling.labeler", None, ["methods.knn.labeling.labeler"]),
        ("methods.sgd.find", SIGMA, ["only the noise of a labeler"]),
        ("methods.supervised.settings", {"1": {}}, ["true_labels"]),
        ("methods.reverse.epsilons", [1, "inf"], ["methods.reverse.epsilons", "settings of inf"]),
        ("base.labeling.labeler", KNN["labeling"]["labeler"], ["base.labeling.labeler"]),
        ("base.student", None, ["base.student", "knn"]),
        ("base", [1], ["base: [1] must be a section with keys"]),
        ("wandb", {"mode": "offline"}, ["wandb", "project"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path, value, words):
    with pytest.raises(ValueError, match=r".") as refused:
        comparison_of(changed(path, value))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_method_must_say_how_it_reaches_each_epsilon():
    whole = document()
    del whole["methods"][0]["find"]
    whole["methods"][0]["settings"] = {0.5: {SIGMA: 100.0}}
    with pytest.raises(ConfigurationError, match="knn: no setting gives ε=2"):
        list(runs_of(comparison_of(whole)))
    whole["methods"][0]["epsilons"] = [0.5]
    assert comparison_of(whole).methods[0].epsilons == (0.5,)


def test_everything_shared_is_the_same_in_all_runs():
    comparison = comparison_of(document(noise_seeded=True))
    runs = list(runs_of(comparison))
    # knn at two ε and without noise; reverse and sgd at two; true labels without ε; two seeds of each.
    assert len(runs) == 2 * (3 + 2 + 2 + 1)
    seeds = set()
    for run in runs:
        made = run.document
        assert made["seed_everything"] == run.seed
        assert get(made, "data.init_args.batch_size") == 32
        assert made["trainer"]["max_epochs"] == (3 if run.method.name == "sgd" else 2)
        if run.method.name == "sgd":
            arguments = made["model"]["init_args"]
            kept = arguments["budget"]
            assert (kept["delta"], kept["epsilon"]) == (1e-4, run.epsilon)
            assert get(made, "model.init_args.optimization.lr") == (0.25 if run.epsilon == 2 else None)
        else:
            assert made["model"] == document()["base"]["student"]
        if run.method.kind == "labeler":
            budget = made["labeling"]["budget"]
            assert (budget["delta"], budget["adjacency"]) == (1e-4, "add_remove")
            assert get(made, "labeling.options.seed") == run.seed
            assert budget.get("epsilon") == (run.epsilon if run.private else None)
        assert made["data"]["init_args"].get("train_on_truth", False) == (run.method.kind == "true_labels")
        for path in ("labeling.labeler.init_args.noise_source", "model.init_args.options.noise_source"):
            if (source := get(made, path)) is not None:
                seeds.add(source["init_args"]["seed"])
    # No two runs draw the same noise: one seed for each but those on true labels.
    assert len(seeds) == len(runs) - 2
    plain = runs_of(comparison_of(document()))
    assert all(get(run.document, "labeling.labeler.init_args.noise_source") is None for run in plain)
    without = next(run for run in runs if not run.private and run.method.name == "knn")
    assert get(without.document, SIGMA) == 0.5
    adjacent = comparison_of(document(adjacency="replace_one", methods=[REVERSE]))
    made = next(runs_of(adjacent)).document["labeling"]
    assert made["budget"]["adjacency"] == "replace_one"


def test_wandb_is_outside_the_fingerprint_and_budgets_of_records_lie_beside_the_run(tmp_path):
    ind = {
        "name": "ind",
        "labeling": {
            "labeler": {"class_path": "IndKNN", "init_args": {"threshold": 0.1, "noise": {"sigma": 0.6}}}
        },
    }
    plain = next(runs_of(comparison_of(document(methods=[ind]))))
    told = comparison_of(document(methods=[ind], wandb={"project": "p", "mode": "offline"}))
    run = next(runs_of(told))
    assert run.fingerprint == plain.fingerprint
    placed = with_run_settings(run.document, run, tmp_path)
    assert "state_dir" not in placed["labeling"]["labeler"]["init_args"]
    (logger,) = placed["trainer"]["logger"]
    assert (logger["init_args"]["group"], logger["init_args"]["offline"]) == ("small", True)
    assert "logger" not in with_run_settings(plain.document, plain, tmp_path)["trainer"]


def test_file_overrides_and_choices(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: c\ndelta: 1e-4\nepsilons: [.inf, 1]\nseeds: [0, 4]\n"
        "base: {data: {class_path: DigitsDataModule}, student: {class_path: SupervisedStudent}}\n"
        "methods:\n- {name: r, labeling: {labeler: {class_path: ReverseKNN}}}\n"
        "- {name: t, true_labels: true}\n"
    )
    comparison = read_comparison(path, {"methods.r.labeling.queries_per_round": 7, "seeds": [4, 0]})
    assert comparison.epsilons == (1.0, math.inf)
    assert comparison.methods[0].sections["labeling"]["queries_per_round"] == 7
    assert [run.label for run in choose(comparison, only=["r"], seeds=[0])] == ["r ε=1 seed 0"]
    assert [run.method.name for run in choose(comparison, epsilons=["inf"])] == ["t", "t"]
    for wrong in ({"only": ["x"]}, {"seeds": [7]}, {"epsilons": [3]}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            choose(comparison, **wrong)
    with pytest.raises(ConfigurationError, match=r"c\.yaml: .*no item 'q'"):
        read_comparison(path, {"methods.q.title": "Q"})
    with pytest.raises(FileNotFoundError):
        read_comparison(tmp_path / "none.yaml")
    given = {"definitions.records": 400, "base.data.init_args.batch_size": 32}
    shipped = read_comparison(Path(__file__).parents[2] / "configs" / "compare_arrays.yaml", given)
    assert shipped.methods[0].sections["labeling"]["labeler"]["init_args"]["private_records"] == 400


def test_configuration_that_fit_would_refuse_is_refused_before_anything_runs():
    planner = Planner()
    for run in runs_of(comparison_of(document())):
        planner.check(run)
    for path, value, word in (
        ("methods.knn.labeling.labeler.init_args.kk", 3, "kk"),
        ("methods.knn.labeling.labeler.class_path", "NoTeacher", "NoTeacher"),
        ("methods.sgd.model.init_args.head", ["a"], "head"),
        ("base.student.init_args.netwrk", "x", "netwrk"),
        ("base.trainer.epochs", 3, "epochs"),
    ):
        runs = runs_of(comparison_of(changed(path, value)))
        run = next(run for run in runs if run.method.name == "sgd" or ".sgd." not in path)
        with pytest.raises(ConfigurationError, match=word):
            planner.check(run)


def test_epsilon_is_given_to_classes_that_take_it_unless_it_is_stated():
    reverse = {
        "name": "reverse",
        "labeling": {"labeler": {"class_path": "ReverseKNN"}, "queries_per_round": 20},
    }
    where = "labeling.budget.epsilon"
    given = list(runs_of(comparison_of(document(methods=[reverse]))))
    assert [get(run.document, where) for run in given] == [0.5, 2, 0.5, 2]
    stated = {**reverse, "settings": {2: {where: 1.5}, 0.5: {where: 0.75}}}
    above, below = list(runs_of(comparison_of(document(methods=[stated]))))[:2]
    assert [get(run.document, where) for run in (above, below)] == [0.75, 1.5]
    planner = Planner()
    assert planner.plan(below).epsilon <= 1.5
    with pytest.raises(ConfigurationError, match=r"reverse ε=0\.5 seed 0: its plan costs ε=0\.7"):
        planner.plan(above)
    unknown = {**reverse, "labeling": {"labeler": {"class_path": "ReverseKnn"}}}
    with pytest.raises(ConfigurationError, match="ReverseKNN"):
        planner.check(next(runs_of(comparison_of(document(methods=[unknown])))))
