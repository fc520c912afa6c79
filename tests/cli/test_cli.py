import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

import pl_privknn
from pl_privknn.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--trainer.max_epochs", "2", "--labeling.epochs_per_round", "1", "--labeling.queries_per_round", "40",
    "--labeling.max_answers", "60", "--labeling.options.progress", "false", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
    "--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1",
]  # fmt: skip
DIGITS = ["--config", str(ROOT / "configs" / "digits_private_knn.yaml")]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder in which a command trained, and what the command printed."""
    folder, printed = tmp_path_factory.mktemp("fitted"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        assert main(["fit", *DIGITS, *SMALL]) == 0
    return folder, printed.getvalue().strip().splitlines()


@pytest.fixture
def run(fitted, tmp_path):
    """A copy of the run below the folder that a test works in."""
    shutil.copytree(fitted[0] / "runs", tmp_path / "runs")
    return Path("runs/digits_private_knn/0")


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_fit_leaves_everything_in_its_folder(fitted, run, capsys):
    assert Path(fitted[1][-1]) == run
    assert any("guarantee" in line for line in fitted[1])
    for name in ("config.yaml", "run.sqlite", "run.sqlite", "metrics.csv", "checkpoints/last.ckpt"):
        assert (run / name).is_file(), name
    summary = summary_of(run)
    wanted = "epsilon_rdp epsilon_pld delta adjacency guarantee answered label_accuracy test_accuracy seconds"
    assert all(summary[name] is not None for name in wanted.split())
    assert summary["queried"] == 80
    # The auditor's figure, from the ledger alone, is the summary's.
    ledger = str(run / "run.sqlite")
    for words in (["audit", ledger], ["epsilon", ledger, "--delta", "1e-4"]):
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(summary["epsilon"], rel=1e-9)
    # Evaluation of what was saved needs the folder alone, and asks the teacher nothing.
    before = Path(ledger).read_bytes()
    for command in ("test", "validate"):
        saved = ["--config", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints/last.ckpt")]
        assert main([command, *saved]) == 0
    assert Path(ledger).read_bytes() == before
    # No private image or label is in what the run leaves: checkpoints hold the student and public facts.
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)
    assert not any("private" in key for key in checkpoint)


def test_resume_continues_in_the_same_folder_under_the_same_parameters_and_budget(run, capsys):
    first = summary_of(run)
    assert main(["fit", "--resume", str(run), "--trainer.max_epochs", "3"]) == 0
    second = summary_of(run)
    assert second["epochs"] == 3
    for name in ("epsilon", "epsilon_spent", "queried", "answered", "label_accuracy"):
        assert second[name] == first[name]
    settings = (run / "config.yaml").read_text()
    assert "max_epochs: 3" in settings
    for words, told in (
        (["--resume", "runs/none"], "config.yaml"),
        (["--resume", str(run), "--labeling.labeler.init_args.k", "41"], "other parameters"),
        ([*DIGITS, *SMALL, "--labeling.budget.epsilon", "0.001"], "of the budget"),
    ):
        capsys.readouterr()
        assert main(["fit", *words]) == 2
        assert told in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == settings  # what was refused is not written


def test_epsilon_of_records(tmp_path, capsys):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([{"mechanism": "gaussian", "sigma": 85, "count": 8192}]))
    assert main(["epsilon", str(path), "--delta", "1e-5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"] == pytest.approx(4.708, rel=0.005)
    assert report["adjacency"] == "add_remove"
    assert main(["epsilon", str(path), "--delta", "1e-5"]) == 0
    assert "epsilon_rdp" in capsys.readouterr().out
    assert main([]) == 0


def test_version_and_a_configuration_of_the_package(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"privknn {pl_privknn.__version__}\n"
    assert not Path("configs").exists()
    assert main(["epsilon", "--fast", "configs/digits_reverse_knn.yaml"]) == 0
    assert "epsilon" in capsys.readouterr().out
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits_reverse_knn.yaml").write_text("labeling: nonsense", encoding="utf-8")
    # A file that is there goes first.
    assert main(["epsilon", "--fast", "configs/digits_reverse_knn.yaml"]) == 2
    assert main(["epsilon", "configs/no_such.yaml"]) == 2
    assert "no_such.yaml" in capsys.readouterr().err


def test_what_fails_after_a_training_takes_nothing_of_its_result(tmp_path, monkeypatch, capsys, recwarn):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_logger.py").write_text(
        "from pytorch_lightning.loggers import CSVLogger\n"
        "class Failing(CSVLogger):\n"
        "    def finalize(self, status):\n"
        "        raise RuntimeError('the server is gone')\n"
    )

    def broken(reason):
        def fail(*_, **__):
            raise OSError(28, reason)

        return fail

    monkeypatch.setattr("pl_privknn.callbacks.run_summary.write_json", broken("No space for the summary"))
    monkeypatch.setattr("pl_privknn.cli.train.write_report", broken("No space for the report"))
    words = ["--trainer.logger", "failing_logger.Failing", "--trainer.logger.save_dir", "logs"]
    assert main(["fit", *DIGITS, *SMALL, *words, "--attach_ledger", "true", "--run_dir", "run"]) == 0
    shown = capsys.readouterr().out
    assert "ε" in shown
    assert "test accuracy" in shown
    told = "".join(str(one.message) for one in recwarn if "the training's result is kept" in str(one.message))
    for reason in ("the server is gone", "No space for the summary", "No space for the report"):
        assert reason in told


def test_a_module_without_a_test_step_trains_privately_and_states_epsilon(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "untested.py").write_text(
        "from benchmarks.faulty import PlainClassifier\nclass Line(PlainClassifier): ...\n"
    )
    training = {"budget": {"epsilon": 2.0}, "expected_batch_size": 50, "private_records": 100}
    config = {
        "model": {"class_path": "untested.Line"},
        "data": {
            "class_path": "DigitsDataModule",
            "init_args": {"private_records": 100, "public_examples": 20},
        },
        "trainer": {"max_epochs": 1, "callbacks": [{"class_path": "PrivateTraining", "init_args": training}]},
        "run_dir": "run",
    }
    (tmp_path / "line.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert main(["fit", "--config", "line.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "ε" in shown
    assert "unconditional" in shown
    assert 1.9 < json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] <= 2.0
