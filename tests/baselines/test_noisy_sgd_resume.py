"""Noisy SGD interrupted, killed and resumed: no step is forgotten and none is free."""

import json
import signal

import pytest
import pytorch_lightning as pl
from ledger_setup import needs_fork
from noisy_sgd_setup import PRIVATE, charged, fit, in_a_dying_child, keep_last, make, power_cut_at

from pl_privknn.cli.main import main
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger, LedgerCorrupt
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noisy_steps import (
    step_mechanism,
)


def test_resume_keeps_epsilon_exact_and_never_spends_less_than_was_drawn(tmp_path, monkeypatch):
    drawn = power_cut_at(8, monkeypatch)  # in the third of five epochs, of three steps each
    with pytest.raises(OSError, match="power cut"):
        fit(make(steps_per_charge=2), tmp_path, 5, callbacks=[keep_last(tmp_path)])
    assert sum(count for _, count in charged(tmp_path)) == 8
    module = make(steps_per_charge=2)
    trainer = fit(
        module, tmp_path, 5, callbacks=[keep_last(tmp_path)], ckpt_path=tmp_path / "ckpt" / "last.ckpt"
    )
    plan = account([Charge(step_mechanism(1.0, 1.0, 30 / PRIVATE), 15)], delta=1e-5).epsilon
    assert module.epsilon == pytest.approx(plan)
    # Two steps were lost with the third epoch: six are in the checkpoint, eight were paid, seven are left.
    assert len(drawn) == 8 + 7
    assert sum(count for _, count in charged(tmp_path)) == 15
    assert trainer.global_step == 6 + 7
    assert module.epsilon_spent == pytest.approx(plan)
    # A further start finds nothing left and draws nothing.
    fit(make(steps_per_charge=2), tmp_path, 5, ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert len(drawn) == 15
    with pytest.raises(ValueError, match="no checkpoint continues it"):
        fit(make(steps_per_charge=2), tmp_path, 5)
    assert len(drawn) == 15


def train_in_a_child(folder, dies):
    def train(noise, checkpoint):
        module = make(steps_per_charge=2, noise_source=noise)
        fit(module, folder, 3, callbacks=[keep_last(folder)], ckpt_path=checkpoint)

    return in_a_dying_child(folder, dies, train)


@needs_fork
def test_killed_process_forgets_nothing(tmp_path):
    assert train_in_a_child(tmp_path, dies=5) == -signal.SIGKILL
    assert sum(count for _, count in charged(tmp_path)) == 6  # the fifth step is the first of the third pair
    assert train_in_a_child(tmp_path, dies=0) == 0
    ((mechanism, count),) = charged(tmp_path)
    assert count == 9 >= (tmp_path / "drawn").stat().st_size == 5 + 3
    report = Ledger.open_readonly(tmp_path / "ledger.sqlite").report()
    assert report.epsilon == pytest.approx(account([Charge(mechanism, 9)], delta=1e-5).epsilon)


@pytest.mark.parametrize(
    "changed",
    [{"noise_multiplier": 2.0}, {"batch_size": 20}, {"clip_norm": 2.0}, {"delta": 1e-6}, {"epochs": 4}],
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
        "--model", "NoisySGD", "--model.network", "tanh_cnn", "--model.batch_size", "250",
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
    assert audited["head"] == summary["ledger_head"]
    assert audited["epsilon"] == pytest.approx(summary["epsilon"])
    # A finished run costs nothing more, and other parameters are an error, not a silent change.
    assert main(["fit", "--resume", "run"]) == 0
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["ledger_head"] == summary["ledger_head"]
    )
    capsys.readouterr()
    assert main(["fit", "--resume", "run", "--model.epsilon", "3"]) == 2
    assert "epsilon=2.0 then, 3.0 now" in capsys.readouterr().err
