"""Private training killed at any step and resumed: no step is forgotten, and ε is that of the whole."""

import signal

import pytest
import pytorch_lightning as pl

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
