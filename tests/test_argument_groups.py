"""Groups of arguments: in Python, YAML, on the command line and in checkpoints, and what came before them."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace

from pl_privknn.argument_groups import in_groups, place_of
from pl_privknn.baselines import NoisyOptimization, NoisySGD, PoissonBatches, TrainingBudget
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.cli.main import main
from pl_privknn.configuration import ReadsFlatArguments
from pl_privknn.labelers.ind_knn import IndKNN, IndKNNSwitches, PublicDensity
from pl_privknn.planning.configuration_plan import plan_of_config
from pl_privknn.students import (
    LabelLoss,
    StudentOptimization,
    SupervisedStudent,
    UDAStudent,
    VATStudent,
    WeakAugmentation,
)

SAVED = Path(__file__).parent / "data" / "run_of_0_1_0"
NETWORK = {"network": "linear_probe", "image_size": 8}
FLAT = {"lr": 0.2, "optimizer": "sgd", "flip": True, "label_smoothing": 0.1, "mean": [0.5], "std": [0.25]}
GROUPED = {
    "optimization": {"lr": 0.2, "optimizer": "sgd"},
    "augmentation": {"flip": True},
    "loss": {"label_smoothing": 0.1},
    "normalization": {"mean": [0.5], "std": [0.25]},
}


def test_flat_arguments_are_those_of_their_groups_with_one_warning():
    with pytest.warns(FutureWarning, match=r"optimization\.lr.* loss\.label_smoothing") as caught:
        flat = VATStudent(**NETWORK, **FLAT)
    assert len([warning for warning in caught if warning.category is FutureWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped = VATStudent(**NETWORK, **GROUPED)
        objects = VATStudent(
            **NETWORK,
            optimization=StudentOptimization(lr=0.2, optimizer="sgd"),
            augmentation=WeakAugmentation(flip=True),
            loss=LabelLoss(label_smoothing=0.1),
            normalization=GROUPED["normalization"],
        )
    assert flat.hparams == grouped.hparams == objects.hparams
    assert flat.optimization == StudentOptimization("sgd", 0.2)
    assert flat.weak == WeakAugmentation(flip=True)
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(flat.normalize(images), (images - 0.5) / 0.25)


def test_a_mapping_changes_some_of_the_defaults_and_flat_arguments_win():
    with pytest.warns(FutureWarning):
        student = UDAStudent(**NETWORK, optimization=StudentOptimization(lr=0.2, momentum=0.5), lr=0.3)
    assert student.optimization == StudentOptimization(lr=0.3, momentum=0.5)
    assert UDAStudent(**NETWORK, optimization=None).optimization == StudentOptimization()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": 1}, TypeError, "no argument 'learning_rate'"),
        (
            {"optimization": {"rate": 1}},
            ValueError,
            "optimization: 'rate' is none of its arguments: optimizer, lr",
        ),
        ({"optimization": "adam"}, ValueError, "optimization='adam' must be a group"),
        ({"optimization": {"lr": -1}}, ValueError, "lr=-1 must be"),
        ({"normalization": {"mean": [0.5]}}, ValueError, "give both"),
    ],
)
def test_mistakes_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        SupervisedStudent(**NETWORK, **arguments)


def test_an_argument_of_a_subclass_stays_its_own():
    class Quick(SupervisedStudent):
        def __init__(self, lr=0.5, **kwargs):
            super().__init__(optimization=StudentOptimization(lr=lr), **kwargs)

    class Closed(SupervisedStudent):
        def __init__(self):
            super().__init__(**NETWORK)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick = Quick(lr=0.25, **NETWORK)
    assert quick.optimization.lr == quick.hparams["lr"] == 0.25
    assert place_of(Quick, "lr") == ("lr",)
    assert place_of(Quick, "momentum") == ("optimization", "momentum")
    assert place_of(Closed, "momentum") is None
    assert in_groups(Closed, {"momentum": 0.5}) == {"momentum": 0.5}


def test_groups_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SupervisedStudent(**NETWORK).optimization.lr = 1.0


def test_a_checkpoint_of_the_first_version_is_loaded():
    with pytest.warns(FutureWarning, match=r"optimization\.schedule_epochs"):
        student = SupervisedStudent.load_from_checkpoint(SAVED / "checkpoints/last.ckpt", map_location="cpu")
    assert student.optimization == StudentOptimization(schedule_epochs=12)
    state = torch.load(SAVED / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in student.state_dict().items())


def config_of(capsys, *words):
    with pytest.raises(SystemExit):
        main(["fit", "--data", "DigitsDataModule", *words, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]


def test_yaml_and_the_command_line_take_both_forms(tmp_path, capsys):
    paths = tmp_path / "flat.yaml", tmp_path / "grouped.yaml"
    for path, arguments in zip(paths, (FLAT, GROUPED), strict=True):
        model = {"class_path": "FixMatchStudent", "init_args": {"network": "linear_probe", **arguments}}
        path.write_text(yaml.safe_dump({"model": model}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        wanted = config_of(
            capsys,
            "--config",
            str(paths[1]),
            "--model.optimization.momentum",
            "0.7",
            "--model.augmentation.shift=0.1",
        )
    with pytest.warns(FutureWarning, match=r"FixMatchStudent.*optimization\.lr"):
        found = config_of(
            capsys, "--config", str(paths[0]), "--model.momentum", "0.7", "--model.init_args.shift=0.1"
        )
    assert found == wanted
    assert found["optimization"]["momentum"] == 0.7
    assert found["augmentation"] == {
        "shift": 0.1,
        "flip": True,
        "fill": 0.0,
        "cutout": 0.0,
        "cutout_fill": None,
    }
    assert found["augment"] == "weak"  # this student's own default


def test_a_section_of_a_parser_takes_both_forms():
    parser = ReadsFlatArguments(exit_on_error=False)
    parser.add_class_arguments(SupervisedStudent, "student")
    with pytest.warns(FutureWarning, match=r"optimization\.lr"):
        words = parser.parse_args(["--student.lr", "0.5"])
    with pytest.warns(FutureWarning, match=r"optimization\.lr"):
        plain = parser.parse_object({"student": {"lr": 0.5}})
    assert words == plain
    assert isinstance(words, Namespace)
    assert words.student.optimization.lr == 0.5


def test_private_trainings_and_teachers_take_both_forms():
    with pytest.warns(FutureWarning, match=r"IndKNN.*budgets\.conversion"):
        flat = IndKNN(0.5, 0.4, 1.0, conversion="rdp", density=PublicDensity(9, 99), kernel="rbf", ids=[3, 1])
    grouped = IndKNN(
        0.5,
        0.4,
        epsilon=1.0,
        budgets={"conversion": "rdp"},
        switches=IndKNNSwitches(density=PublicDensity(9, 99)),
        similarity={"kernel": "rbf"},
        records={"ids": [3, 1]},
    )
    assert flat.parameters == grouped.parameters
    assert flat.parameters.min_count == 9
    assert (flat.switches, flat.ids) == (grouped.switches, grouped.ids)
    with pytest.warns(FutureWarning, match=r"PrivateLabeler.*budget\.delta.*files\.run_dir"):
        labeling = PrivateLabeler(delta=1e-6, max_epsilon=2.0, run_dir="here", rounds=2)
    assert (labeling.delta, labeling.max_epsilon, labeling.run_dir) == (1e-6, 2.0, Path("here"))
    arguments = {
        "batch_size": 50,
        "expected_records": 1000,
        "noise_multiplier": 2.0,
        "delta": 1e-6,
        "lr": 2.0,
    }
    with pytest.warns(FutureWarning, match=r"NoisySGD.*batches\.batch_size.*budget\.delta"):
        flat = NoisySGD("tanh_cnn", **arguments, clip_norm=0.5, ledger_path="ledger.sqlite")
    grouped = NoisySGD(
        "tanh_cnn",
        batches=PoissonBatches(50, expected_records=1000),
        budget=TrainingBudget(delta=1e-6, noise_multiplier=2.0),
        optimization=NoisyOptimization(lr=2.0),
        gradients={"clip_norm": 0.5},
        files={"ledger_path": Path("ledger.sqlite")},
    )
    assert flat.hparams == grouped.hparams
    assert (flat.session.sampling_rate, flat.session.budget.delta, flat.session.batch_size) == (
        0.05,
        1e-6,
        50,
    )
    assert flat.session.ledger_path == grouped.session.ledger_path == Path("ledger.sqlite")
    assert type(flat.configure_optimizers()) is torch.optim.SGD


def test_a_file_costs_the_same_in_both_forms():
    knn = {"class_path": "PrivateKNN", "init_args": {"k": 30, "sampling_rate": 0.5}}
    asked = {"labeler": knn, "queries_per_round": 40}
    flat = {"labeling": {**asked, "delta": 1e-6, "adjacency": "add_remove"}}
    grouped = {"labeling": {**asked, "budget": {"delta": 1e-6, "adjacency": "add_remove"}}}
    with pytest.warns(FutureWarning, match=r"PrivateLabeler.*budget\.delta"):
        stated = plan_of_config(flat, "flat.yaml", 10)
    assert stated == plan_of_config(grouped, "grouped.yaml", 10)
    assert stated.delta == 1e-6
