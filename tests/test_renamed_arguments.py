"""``target_epsilon`` is ``epsilon`` now: what was saved or called by the earlier name says the same as before."""

import copy
import warnings

import pytest
import torch
import yaml

from pl_privknn.argument_groups import place_of
from pl_privknn.baselines import NoisySGD, TrainingBudget
from pl_privknn.cli.main import main
from pl_privknn.comparison.run import runs_of
from pl_privknn.comparison.specification_file import comparison_of
from pl_privknn.labelers import ClassSums, NoisySGDTeacher
from pl_privknn.planning.configuration_plan import plan_of_config

ARGUMENTS = {"network": "tanh_cnn", "batches": {"batch_size": 50, "expected_records": 1000}}


def sgd(**budget):
    return {"class_path": "NoisySGD", "init_args": {**ARGUMENTS, "budget": budget}}


def teaching(**named):
    labeler = {"class_path": "NoisySGDTeacher", "init_args": {"sampling_rate": 0.1, "steps": 20, **named}}
    return {"labeling": {"labeler": labeler, "queries_per_round": 10}}


def test_python_reads_both_names_and_warns_of_the_earlier():
    with pytest.warns(FutureWarning, match=r"TrainingBudget.*give epsilon"):
        assert TrainingBudget(target_epsilon=2.0) == TrainingBudget(epsilon=2.0)
    with pytest.warns(FutureWarning, match=r"NoisySGDTeacher.*give epsilon"):
        old = NoisySGDTeacher(steps=5, target_epsilon=1.0)
    with pytest.warns(FutureWarning, match=r"StatisticsTeacher.*give epsilon"):
        sums = ClassSums(target_epsilon=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert old.mechanism == NoisySGDTeacher(steps=5, epsilon=1.0).mechanism
        assert sums.noise_multiplier == ClassSums(epsilon=1.0).noise_multiplier
        new = NoisySGD(**ARGUMENTS, budget=TrainingBudget(epsilon=1.0))
    for arguments in ({"target_epsilon": 1.0}, {"budget": {"target_epsilon": 1.0}}):
        with pytest.warns(FutureWarning, match=r"NoisySGD.*give budget\.epsilon"):
            assert NoisySGD(**ARGUMENTS, **arguments).hparams == new.hparams
    with pytest.raises(TypeError, match="target_epsilon is the earlier name of epsilon"):
        TrainingBudget(target_epsilon=1.0, epsilon=2.0)


def test_places_of_both_names():
    assert place_of(NoisySGD, "target_epsilon") == place_of(NoisySGD, "epsilon") == ("budget", "epsilon")
    assert place_of(NoisySGD, "budget.target_epsilon") == ("budget", "epsilon")
    assert place_of(ClassSums, "target_epsilon") == ("epsilon",)
    assert place_of(NoisySGD, "batches.target_epsilon") is None


def test_a_checkpoint_with_the_earlier_name_is_loaded(tmp_path):
    module = NoisySGD(**ARGUMENTS, budget=TrainingBudget(epsilon=1.5))
    parameters = copy.deepcopy(dict(module.hparams))
    parameters["budget"]["target_epsilon"] = parameters["budget"].pop("epsilon")
    saved = {
        "state_dict": module.state_dict(),
        "hyper_parameters": parameters,
        "pytorch-lightning_version": "2.0.0",
    }
    torch.save(saved, tmp_path / "old.ckpt")
    with pytest.warns(FutureWarning, match=r"budget\.epsilon"):
        loaded = NoisySGD.load_from_checkpoint(tmp_path / "old.ckpt", map_location="cpu")
    assert loaded.hparams == module.hparams
    assert loaded.session.budget.epsilon == 1.5


def test_a_saved_configuration_and_words_of_the_shell_say_the_same(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(
        yaml.safe_dump({"model": sgd(target_epsilon=1.0), "data": {"class_path": "DigitsDataModule"}})
    )
    new.write_text(yaml.safe_dump({"model": sgd(epsilon=1.0), "data": {"class_path": "DigitsDataModule"}}))

    def budget(*words):
        with pytest.raises(SystemExit):
            main(["fit", *map(str, words), "--print_config"])
        return yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["budget"]

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        wanted = budget("--config", new)
    assert wanted["epsilon"] == 1.0
    with pytest.warns(FutureWarning, match=r"budget\.epsilon"):
        assert budget("--config", old) == wanted
    # What is said later decides, whichever of the names it has.
    for words in (("--model.budget.target_epsilon", 3), ("--model.target_epsilon", 3)):
        with pytest.warns(FutureWarning, match=r"budget\.epsilon"):
            assert budget("--config", new, *words) == {**wanted, "epsilon": 3.0}
    with pytest.warns(FutureWarning, match=r"budget\.epsilon"):
        assert budget("--config", old, "--model.budget.epsilon", 3) == {**wanted, "epsilon": 3.0}


def test_a_file_with_the_earlier_name_costs_the_same():
    with pytest.warns(FutureWarning, match=r"NoisySGDTeacher.*give epsilon"):
        stated = plan_of_config(teaching(target_epsilon=0.7), "old.yaml", 10)
    assert stated == plan_of_config(teaching(epsilon=0.7), "new.yaml", 10)


def comparison(base, method):
    return {
        "name": "named",
        "base": {
            "data": {"class_path": "DigitsDataModule"},
            "student": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
            "trainer": {"max_epochs": 2},
            "labeling": {"rounds": 1},
        },
        "delta": 1e-4,
        "seeds": [0],
        "epsilons": [0.5, 2],
        "methods": [
            {
                "name": "sgd",
                "model": sgd(**{base: 9.0}),
                "epsilon_to": f"model.init_args.budget.{method}",
            },
            {
                "name": "teacher",
                "labeling": teaching(**{base: 9.0})["labeling"],
                "epsilon_to": f"labeling.labeler.init_args.{method}",
            },
        ],
    }


@pytest.mark.parametrize("base", ["epsilon", "target_epsilon"])
@pytest.mark.parametrize("method", ["epsilon", "target_epsilon"])
def test_comparisons_reach_their_epsilon_by_either_name(base, method):
    wanted = list(runs_of(comparison_of(comparison("epsilon", "epsilon"))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        runs = list(runs_of(comparison_of(comparison(base, method))))
    assert [run.fingerprint for run in runs] == [run.fingerprint for run in wanted]
    for run in runs:
        made = run.document.get("labeling", {}).get("labeler") or run.document["model"]
        arguments = made["init_args"]
        assert arguments.get("budget", arguments)["epsilon"] == run.epsilon
