"""Private training killed at any step and resumed: no step is forgotten, and ε is that of the whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.training.noisy_sgd_setup import charged, in_a_dying_child, keep_last, power_cut_at
from tests.training.training_setup import Lit, fit, training


def test_resume_keeps_epsilon_exact_and_never_spends_less_than_was_drawn(tmp_path, monkeypatch):
    drawn = power_cut_at(8, monkeypatch)  # in the third of five epochs, of three steps each
    last, plan = tmp_path / "ckpt" / "last.ckpt", account([Charge(Gaussian(1.0, 1.0, 1 / 3), 15)], delta=1e-5)
    with pytest.raises(OSError, match="power cut"):
        fit(Lit(), tmp_path, training(steps_per_charge=2), 5, callbacks=[keep_last(tmp_path)])
    assert sum(count for _, count in charged(tmp_path)) == 9  # rows of 1, 2, 2, 2 and 2 steps
    seen = []

    class Spent(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(callback.epsilon_spent)

    callback = training(steps_per_charge=2)
    _, trainer = fit(Lit(), tmp_path, callback, 5, callbacks=[keep_last(tmp_path), Spent()], ckpt_path=last)
    nine = account([Charge(Gaussian(1.0, 1.0, 1 / 3), 9)], delta=1e-5).epsilon
    # After the trial epoch: of the steps that were run, and not of those planned.
    assert seen == [pytest.approx(nine)] * 2
    assert callback.epsilon == pytest.approx(plan.epsilon)
    assert callback.epsilon_spent == pytest.approx(plan.epsilon)
    # Three steps were lost with the third epoch: six are in the checkpoint, nine were paid, six are left.
    assert len(drawn) == 8 + 6
    assert trainer.global_step == 6 + 6
    fit(Lit(), tmp_path, training(steps_per_charge=2), 5, ckpt_path=last)  # nothing is left to draw
    assert len(drawn) == 14
    with pytest.raises(ValueError, match="no checkpoint continues it"):
        fit(Lit(), tmp_path, training(steps_per_charge=2), 5)
    with pytest.raises(ValueError, match="other parameters"):
        fit(Lit(), tmp_path, training(noise_multiplier=2.0, steps_per_charge=2), 5, ckpt_path=last)


def train_in_a_child(folder, dies=0):
    def train(noise, checkpoint):
        callback = training(steps_per_charge=2, noise_source=noise)
        fit(Lit(), folder, callback, 3, callbacks=[keep_last(folder)], ckpt_path=checkpoint)

    return in_a_dying_child(folder, dies, train)


@needs_fork
@pytest.mark.parametrize("dies", [1, 9])
def test_a_killed_training_ends_at_the_epsilon_of_the_uninterrupted_one(tmp_path, dies):
    assert train_in_a_child(tmp_path, dies) == -signal.SIGKILL
    paid = sum(count for _, count in charged(tmp_path))
    assert dies <= paid <= dies + 1  # rows of two steps, written before the first of them
    assert train_in_a_child(tmp_path) == 0
    ((mechanism, count),) = charged(tmp_path)
    drawn = (tmp_path / "drawn").stat().st_size
    assert drawn <= count == 9
    report = Ledger.open_readonly(tmp_path / "run.sqlite").report()
    assert report.epsilon == pytest.approx(account([Charge(mechanism, 9)], delta=1e-5).epsilon)


PLANNED = 15


def paid_at(step):
    """Steps that are paid for when the noise of a step is drawn: rows of 1, 2, 4 and 8."""
    return next(count for count in (1, 3, 7, 15) if count >= step)


def check_continued(folder, step, trainer, callback):
    """The training goes on after the steps that were paid for, at the ε of the uninterrupted one."""
    ((mechanism, count),) = charged(folder)
    assert count == PLANNED
    assert trainer.global_step == step - 1 + PLANNED - paid_at(step)
    plan = account([Charge(mechanism, PLANNED)], delta=1e-5).epsilon
    assert callback.epsilon == callback.epsilon_spent == pytest.approx(plan)


STOPS = [
    *((step, OSError("disk full")) for step in range(1, 11)),
    (1, KeyboardInterrupt()),
    (6, KeyboardInterrupt()),
]


@pytest.mark.parametrize(("step", "error"), STOPS)
def test_what_stops_a_training_leaves_a_checkpoint_that_continues_after_the_paid_steps(
    tmp_path, monkeypatch, step, error
):
    drawn, original = [], Gaussian.add_noise

    def add_noise(self, values, noise):
        drawn.append(self)
        if len(drawn) == step:
            raise error
        return original(self, values, noise)

    monkeypatch.setattr(Gaussian, "add_noise", add_noise)
    module, handler = Lit(), signal.getsignal(signal.SIGINT)
    with pytest.raises((OSError, SystemExit)):
        fit(module, tmp_path, training(), 5)
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert sum(count for _, count in charged(tmp_path)) == paid_at(step)
    saved = tmp_path / "interrupted.ckpt"
    weights = torch.load(saved, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    callback, trainer = fit(Lit(), tmp_path, training(), 5, ckpt_path=saved)
    assert len(drawn) == step + PLANNED - paid_at(step)
    check_continued(tmp_path, step, trainer, callback)


def kill_and_continue(folder, step):
    """Kill a training before the noise of a step is drawn, and continue it."""
    folder.mkdir()
    keep = ModelCheckpoint(
        folder / "ckpt", filename="last", every_n_train_steps=1, enable_version_counter=False
    )

    def train(noise, checkpoint):
        callback, trainer = fit(
            Lit(), folder, training(noise_source=noise), 5, callbacks=[keep], ckpt_path=checkpoint
        )
        if checkpoint is not None:
            check_continued(folder, step, trainer, callback)

    assert in_a_dying_child(folder, step, train) == -signal.SIGKILL
    assert sum(count for _, count in charged(folder)) == paid_at(step)
    if step > 1:
        assert in_a_dying_child(folder, 0, train) == 0


@needs_fork
@pytest.mark.long
def test_a_training_that_is_killed_continues_after_the_paid_steps(tmp_path):
    # In a process of its own: where other tests have let autograd start threads, no fork can train.
    lines = (
        "import pathlib",
        "from tests.training.test_kill import kill_and_continue",
        f"for step in range(1, 11): kill_and_continue(pathlib.Path({str(tmp_path)!r}) / str(step), step)",
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
