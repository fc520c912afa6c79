"""Private training killed at any step and resumed: no step is forgotten, and ε is that of the whole."""

import signal

import pytest
from ledger_setup import needs_fork
from noisy_sgd_setup import charged, in_a_dying_child, keep_last
from training_setup import Lit, fit, training

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge


def train_in_a_child(folder, dies=0):
    def train(noise, checkpoint):
        callback = training(steps_per_charge=2, noise_source=noise)
        fit(Lit(), folder, callback, 3, callbacks=[keep_last(folder)], ckpt_path=checkpoint)

    return in_a_dying_child(folder, dies, train)


@needs_fork
@pytest.mark.parametrize("dies", [1, 5, 9])
def test_a_killed_training_ends_at_the_epsilon_of_the_uninterrupted_one(tmp_path, dies):
    assert train_in_a_child(tmp_path, dies) == -signal.SIGKILL
    paid = sum(count for _, count in charged(tmp_path))
    assert dies <= paid <= dies + 1  # rows of two steps, written before the first of them
    assert train_in_a_child(tmp_path) == 0
    ((mechanism, count),) = charged(tmp_path)
    drawn = (tmp_path / "drawn").stat().st_size
    assert drawn <= count == 9
    report = Ledger.open_readonly(tmp_path / "ledger.sqlite").report()
    assert report.epsilon == pytest.approx(account([Charge(mechanism, 9)], delta=1e-5).epsilon)
