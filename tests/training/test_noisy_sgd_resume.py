"""Noisy SGD interrupted, killed and resumed: no step is forgotten and none is free."""

import json

import pytest
import pytorch_lightning as pl
from noisy_sgd_setup import fit, keep_last, make

from pl_privknn.cli.main import main
from pl_privknn.privacy.ledger import LedgerCorrupt


@pytest.mark.parametrize(
    "changed",
    [
        {"noise_multiplier": 2.0},
        {"expected_batch_size": 20},
        {"max_grad_norm": 2.0},
        {"delta": 1e-6},
        {"epochs": 4},
    ],
)
def test_other_privacy_parameters_on_resume_are_refused(tmp_path, changed):
    fit(make(), tmp_path, 2, callbacks=[keep_last(tmp_path)])
    epochs = changed.pop("epochs", 3)
    with pytest.raises(ValueError, match="other parameters"):
        fit(make(**changed), tmp_path, epochs, ckpt_path=tmp_path / "ckpt" / "last.ckpt")


def test_a_missing_or_older_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    copies = []

    class Copy(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            copies.append(path.read_bytes())

    fit(make(), tmp_path, callbacks=[keep_last(tmp_path), Copy()])
    resume = {"ckpt_path": tmp_path / "ckpt" / "last.ckpt"}
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="ledger"):
        fit(make(), tmp_path, **resume)
    path.write_bytes(copies[0])
    with pytest.raises(LedgerCorrupt, match="older copy"):
        fit(make(), tmp_path, **resume)
    (tmp_path / "ledger.head").unlink()  # the checkpoint alone tells, too
    with pytest.raises(ValueError, match="older copy"):
        fit(make(), tmp_path, **resume)


@pytest.mark.long
def test_command_line_and_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "--model", "NoisySGD", "--model.network", "tanh_cnn", "--model.expected_batch_size", "250",
        "--model.expected_records", "1000",
        "--model.epsilon", "2", "--model.delta", "1e-4", "--data", "DigitsDataModule", "--run_dir", "run",
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "2",
        "--trainer.enable_model_summary", "false",
    ]  # fmt: skip
    assert main(["fit", *words]) == 0
    assert "noisy steps" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1.98 < summary["epsilon"] <= 2
    assert (summary["delta"], summary["adjacency"], summary["guarantee"]) == (
        1e-4,
        "add_remove",
        "unconditional",
    )
    assert summary["steps"] == 8
    assert 0 <= summary["test_accuracy"] <= 1
    assert main(["audit", "run/ledger.sqlite", "--delta", "1e-4", "--json"]) == 0
    audited = json.loads(capsys.readouterr().out)
    assert audited["epsilon"] == pytest.approx(summary["epsilon"])
    # A finished run costs nothing more, and other parameters are an error, not a silent change.
    assert main(["fit", "--resume", "run"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] == summary["epsilon"]
    assert main(["audit", "run"]) == 0
    capsys.readouterr()
    assert main(["fit", "--resume", "run", "--model.epsilon", "3"]) == 2
    assert "epsilon=2.0 then, 3.0 now" in capsys.readouterr().err
