"""The training commands as a shell gives them: help, folders, loggers, own modules, Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pl_privknn.cli import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ["--config", "configs/digits_reverse_knn.yaml"]
SHORT = [
    "--trainer.max_epochs", "2", "--trainer.limit_train_batches", "1", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
    "--labeling.epochs_per_round", "1", "--labeling.options.progress", "false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # Lightning ignores it after the first


def helped(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_in_full_has_all_options_and_the_short_one_no_others(capsys):
    every, short = helped(capsys, "fit", "--help-all"), helped(capsys, "fit", "--help")
    assert "--trainer.max_epochs" in every
    of_sections = short[short.index("sections of the configuration") :]
    for option in re.findall(r"^  (--[a-z.]+)(?= [A-Z])", of_sections, re.MULTILINE):
        assert option in every, option


def test_short_help_and_plain_mistakes_need_no_torch():
    code = """
import sys
from pl_privknn.cli import main

for words in ["--help"], ["fit", "--help"], ["test", "-h"], ["plan", "--help"], ["audit", "--help-all"]:
    try:
        main(words)
    except SystemExit as stopped:
        assert stopped.code == 0
assert main(["fit"]) == main(["fit", "--confg", "x"]) == main(["fit", "--config", "none.yaml"]) == 2
assert main(["validate", "--resume", "nowhere"]) == main(["plans"]) == main(["audit"]) == 2
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "privknn init --data" in done.stdout
    assert "--attack" in done.stdout


def test_own_module_beside_the_config_and_loggers_and_folders_where_they_were_asked_for(tmp_path, capsys):
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    (beside / "my_callback_of_a_test.py").write_text(
        "import pytorch_lightning as pl\n"
        "class Stops(pl.Callback):\n"
        "    def __init__(self, at: int = 0):\n"
        "        self.at = at\n"
        "    def on_train_epoch_start(self, trainer, pl_module):\n"
        "        if trainer.current_epoch == self.at:\n"
        "            raise KeyboardInterrupt\n"
    )
    (beside / "run.yaml").write_text(
        (ROOT / "configs" / "digits_reverse_knn.yaml").read_text(encoding="utf-8")
        + "  callbacks: [{class_path: my_callback_of_a_test.Stops, init_args: {at: 1}}]\n"
    )
    path = list(sys.path)
    words = ["fit", "--config", str(beside / "run.yaml"), *SHORT, "--trainer.default_root_dir", "deep/down"]
    assert main([*words, "--trainer.logger", "TensorBoardLogger"]) == 130
    assert sys.path == path
    folder = Path("deep/down/run/0")
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.endswith(f"privknn fit --resume {folder}")
    assert not Path("runs").exists()
    (events,) = folder.rglob("events.out.tfevents.*")
    assert b"privacy/epsilon" in events.read_bytes()
    assert not list(Path().glob("lightning_logs"))
    # What the message says goes on, and asks nothing again.
    again = told[told.index("fit") :].split()
    assert main([*again, "--trainer.callbacks", "null"]) == 0
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["epochs"], summary["queried"]) == (2, 30)


def test_an_interruption_before_the_run_says_so(monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pl_privknn.cli.train.PrivKNNCLI.instantiate_classes", stop)
    assert main(["fit", *CONFIG]) == 130
    assert "no privacy budget was spent" in capsys.readouterr().err
