"""Private training killed at any step and resumed: no step is forgotten, and ε is that of the whole."""

import os
import signal
from pathlib import Path

import pytest
from ledger_setup import needs_fork
from noisy_sgd_setup import charged, keep_last
from training_setup import Lit, fit, training

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noise import SeededNoise


class DyingNoise(SeededNoise):
    """Notes each step before its noise is drawn, and dies before one of them."""

    folder: Path
    dies = 0

    def stream(self, *key):
        child = SeededNoise.stream(self, *key)
        child.__class__ = DyingNoise
        return child

    def normal(self, shape, scale):
        with (self.folder / "drawn").open("a") as file:
            file.write("x")
            file.flush()
            os.fsync(file.fileno())
        if (self.folder / "drawn").stat().st_size == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().normal(shape, scale)


def train_in_a_child(folder, dies=0):
    """Train, going on from the last checkpoint; how the child ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            DyingNoise.folder, DyingNoise.dies = folder, dies
            last = folder / "ckpt" / "last.ckpt"
            callback = training(steps_per_charge=2, noise_source=DyingNoise(0))
            path = last if last.exists() else None
            fit(Lit(), folder, callback, 3, callbacks=[keep_last(folder)], ckpt_path=path)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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
