"""What a run from Python leaves: as much as one from the shell."""

import dataclasses
import json

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.cli import main
from pl_privknn.config import HasInitArguments, as_section
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features import HOG
from pl_privknn.labelers import PrivateKNN, ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.mechanisms import Gaussian, Laplace
from pl_privknn.report import write_report
from pl_privknn.training import NoisySGD, PrivateTraining, TrainingOptions
from tests.report.report_setup import CLASSES, QUERIES, SIDE, small_data
from tests.setup.small_fit import quiet_trainer, small_student
from tests.training.training_setup import Lit


def student():
    return small_student(CLASSES, SIDE)


def run(root, module, data, *callbacks):
    made = quiet_trainer(root, callbacks=list(callbacks))
    made.fit(module, data)
    return made


def labeling(run_dir=None):
    return PrivateLabeler(
        ReverseKNN(budget=Budget(epsilon=2.0), k=1),
        queries_per_round=6,
        epochs_per_round=1,
        features=torch.nn.Flatten(),
        budget=Budget(delta=1e-4),
        run_dir=run_dir,
        options={"progress": False},
    )


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_labelers_run_leaves_summary_table_and_settings_without_a_report_of_its_own(tmp_path, capsys):
    folder, module, data = tmp_path / "mine", student(), small_data()
    trainer = run(tmp_path, module, data, labeling(run_dir=folder))
    summary = summary_of(folder)
    assert summary["epsilon"] == pytest.approx(2.0, abs=1e-3)
    assert "strongest attack" in capsys.readouterr().out
    trainer.test(module, data, verbose=False)
    tested = summary_of(folder)
    assert tested["test_accuracy"] is not None
    assert tested["epsilon"] == summary["epsilon"]
    assert "test accuracy" in capsys.readouterr().out
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine"]
    assert main(["audit", str(folder / "summary.json"), str(folder / "run.sqlite")]) == 0
    page = write_report(folder)
    assert (page.parent / "privacy_card.md").is_file()
    assert "ReverseKNN" in page.read_text()
    assert main(["fit", "--resume", str(folder)]) == 2
    assert "data.private_images" in capsys.readouterr().err
    # Another fit in the folder goes on with its labels.
    run(tmp_path, student(), small_data(), labeling(run_dir=folder))
    assert all(summary_of(folder)[name] == summary[name] for name in ("epsilon", "run", "queried"))


def refused(name):
    raise AssertionError(f"{name} is no JSON")


def test_the_summary_of_a_run_without_noise_is_json_and_agrees_with_its_ledger(tmp_path, capsys):
    module = Lit(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, CLASSES)))
    given = {"expected_batch_size": 8, "private_records": 60, "run_dir": tmp_path}
    run(
        tmp_path,
        module,
        small_data(),
        PrivateTraining(budget=Budget(delta=1e-4), **given, noise_multiplier=0.0),
    )
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refused)
    assert (summary["epsilon"], summary["guarantee"]) == ("inf", "none")
    files = [str(tmp_path / "summary.json"), str(tmp_path / "run.sqlite")]
    assert main(["audit", *files]) == 0
    assert main(["audit", str(tmp_path)]) == 0
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "epsilon": 1.0}))
    assert main(["audit", *files]) == 1
    capsys.readouterr()


def test_private_training_leaves_the_same(tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE * SIDE, CLASSES))
    module = Lit(net)
    module.accuracy = MulticlassAccuracy(CLASSES)
    given = {"expected_batch_size": 8, "private_records": 60}
    run(tmp_path, module, small_data(), PrivateTraining(budget=Budget(epsilon=8.0, delta=1e-4), **given))
    assert 0 < summary_of(tmp_path)["epsilon"] <= 8.0
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written["trainer"]["callbacks"][0]["init_args"]["private_records"] == 60
    assert "model" not in written


def test_what_can_be_written_is_a_configuration_that_the_shell_runs(tmp_path, monkeypatch, capsys):
    generator = torch.Generator().manual_seed(0)
    files = {}
    for part, count in (("private", 60), ("public", 24), ("test", 30)):
        for name, values in (
            ("images", torch.rand(count, 1, SIDE, SIDE, generator=generator)),
            ("truth" if part == "public" else "labels", torch.arange(count) % CLASSES),
        ):
            files[f"{part}_{name}"] = tmp_path / f"{part}_{name}.npy"
            np.save(files[f"{part}_{name}"], values.numpy())
    data = ArraysDataModule(**files, num_classes=CLASSES, batch_size=8)
    teaching = PrivateLabeler(
        PrivateKNN(5, 0.8, None, Gaussian(sigma=4.0)), queries_per_round=6, features=HOG(pixels_per_cell=(3, 3)),
        budget=Budget(delta=1e-4), run_dir=tmp_path / "run", options={"progress": False},
    )  # fmt: skip
    run(tmp_path, student(), data, teaching)
    shell = ["fit", "--config", str(tmp_path / "run" / "config.yaml"), "--run_dir", str(tmp_path / "shell")]
    assert main([*shell, "--labeling.run_dir", str(tmp_path / "shell")]) == 0, capsys.readouterr().err
    first, again = summary_of(tmp_path / "run"), summary_of(tmp_path / "shell")
    assert (again["epsilon"], again["queried"]) == (first["epsilon"], first["queried"])
    # The folder of a command keeps the command's own configuration.
    kept = (tmp_path / "shell" / "config.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    run(tmp_path, student(), data, RunReport(tmp_path / "shell"))
    assert (tmp_path / "shell" / "config.yaml").read_text() == kept


def test_no_data_is_kept_of_arguments():
    class Own(ArraysDataModule):
        def __init__(self, ages, clinic, private_count, **arrays):
            super().__init__(**arrays)

    images, labels = torch.rand(6, 1, 4, 4), [0, 1, 0, 1, 0, 1]
    arrays = {f"{part}_images": images for part in ("private", "public", "test")}
    arrays |= {"private_labels": labels, "public_truth": labels, "test_labels": labels}
    own = Own([31, 45], "north", private_count=6, **arrays, num_classes=2, class_names=["a", "b"])
    section, left_out = as_section(own)
    public = {"public_truth": labels, "test_labels": labels, "num_classes": 2, "class_names": ["a", "b"]}
    assert section["init_args"] == public
    private = ["ages", "clinic", "private_count", "private_images", "private_labels"]
    assert sorted(left_out) == [*private, "public_images", "test_images"]


def test_groups_and_parts_are_written_as_yaml_says_them():
    @dataclasses.dataclass(frozen=True)
    class Holder:
        tensor: torch.Tensor

    class Outer(HasInitArguments):
        def __init__(self, *parts, budget=None, scale=1.0, holder=None):
            pass

    groups = {"budget": Budget(delta=1e-4), "holder": Holder(torch.ones(2))}
    made = Outer("lost by place", scale=np.float32(0.5), **groups)
    section, left_out = as_section(made)
    assert section["init_args"] == {"budget": {"delta": 1e-4}, "scale": 0.5}
    assert left_out == ["holder"]
    options = TrainingOptions(augment=torch.flip, views=2)
    training = PrivateTraining(
        budget=Budget(epsilon=1.0), expected_batch_size=4, private_records=40, options=options
    )
    assert as_section(training)[0]["init_args"]["options"] == {"views": 2}
    assert as_section(training)[1] == ["options.augment"]


def test_runs_without_a_logger_get_folders_of_their_own_and_say_where(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
            run(None, student(), small_data(), labeling())
        place = f"runs/SupervisedStudent/{number}"
        assert (tmp_path / place / "summary.json").is_file()
        assert f"run: {place}" in caplog.text
    assert not (tmp_path / "run.sqlite").exists()
    mine = PrivateLabeler(ReverseKNN(budget=Budget(epsilon=2.0), k=1), run_dir=tmp_path / "mine")
    assert mine.run_dir == tmp_path / "mine"
    training = PrivateTraining(
        budget=Budget(epsilon=1.0), expected_batch_size=4, private_records=40, run_dir=tmp_path / "mine"
    )
    assert training.run_dir == tmp_path / "mine"


def test_a_poor_result_names_the_features_and_better_ones(tmp_path, capsys):
    random = torch.Generator().manual_seed(0)  # images that tell nothing of their classes
    images = torch.rand(150, SIDE, SIDE, generator=random).numpy()
    labels = (torch.arange(150) % CLASSES).numpy()
    data = ArraysDataModule(
        private_images=images[:60], private_labels=labels[:60], public_images=images[60:90],
        test_images=images[90:], test_labels=labels[90:], num_classes=CLASSES, batch_size=10,
    )  # fmt: skip
    module = student()
    trainer = run(tmp_path, module, data, labeling(run_dir=tmp_path / "run"))
    trainer.test(module, data, verbose=False)
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "always predicting the most frequent class gets 0.333" in said
    assert "Features: Flatten; try PublicFeatures" in said


def test_the_printed_table_keeps_what_stands_in_brackets(tmp_path, capsys):
    class Advice(RunReport):
        def table(self):
            return [("poor, so try", "pip install 'pl-privknn[imagenet]'")]

    Advice(tmp_path).print_table()
    assert "pip install 'pl-privknn[imagenet]'" in capsys.readouterr().out


RESULTS = {
    "labeler": lambda: labeling(),
    "training": lambda: PrivateTraining(Budget(1.0, 1e-4), expected_batch_size=4, private_records=40),
    "noisy sgd": lambda: NoisySGD(budget=Budget(1.0, 1e-4), expected_batch_size=4, private_records=40),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_the_same_names_before_the_fit(name):
    made = RESULTS[name]()
    assert (made.epsilon, made.epsilon_spent, made.delta) == (0.0, 0.0, 1e-4)
    assert (made.guarantee, made.ledger, made.run_dir) == (None, None, None)
    with pytest.raises(RuntimeError, match=r"before trainer\.fit"):
        made.report()


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_run_stopped_by_the_keyboard_says_what_it_spent_and_continues(
    checkpoints, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    class Stops(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                raise KeyboardInterrupt

    def fit(*others, **given):
        teacher = ReverseKNN(noise=Laplace(scale=5.0))
        labeling = PrivateLabeler(
            teacher,
            queries_per_round=QUERIES,
            features=torch.nn.Flatten(),
            epochs_per_round=2,
            run_dir="stopped",
        )
        trainer = quiet_trainer(tmp_path, 2, callbacks=[labeling, *others], enable_checkpointing=checkpoints)
        trainer.fit(small_student(CLASSES, SIDE), small_data(), **given)
        return labeling

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Stops())
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"labels of {QUERIES} queries" in said
    assert ("a checkpoint" in said) == checkpoints
    argument, _, place = said.rpartition(" and ")[2].partition("=")
    assert argument == ("ckpt_path" if checkpoints else "run_dir")
    given = {"ckpt_path": place.strip("'")} if checkpoints else {}
    assert fit(**given).label_counts()["queried"] == QUERIES  # nothing is asked again
