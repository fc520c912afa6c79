"""A run that dies by SIGKILL at a chosen event of labelling; for a child of test_kill_and_resume."""

import os
import signal
from pathlib import Path

import torch

from pl_privknn import Gaussian, PrivateKNN, Screening
from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.small_fit import quiet_trainer, small_student
from tests.training.noisy_sgd_setup import make_data


class DyingNoise(SeededNoise):
    """Notes each release in a file before it is drawn; kills the process at a chosen one."""

    folder: Path
    die_at = -1

    def stream(self, *key):
        child = SeededNoise.stream(self, *key)
        child.__class__ = DyingNoise
        return child

    def normal_at_least(self, thresholds, scale):
        self.note(len(thresholds))
        return super().normal_at_least(thresholds, scale)

    def rounded_normal(self, shape, sigma):
        self.note(-shape[0])
        return super().rounded_normal(shape, sigma)

    def note(self, count):
        drawn = self.folder / "drawn.txt"
        with drawn.open("a") as file:
            file.write(f"{count}\n")  # screenings above 0, answers below
            file.flush()
            os.fsync(file.fileno())
        if len(drawn.read_text().splitlines()) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, die_at: int, die_on: str) -> None:
    torch.set_num_threads(1)
    DyingNoise.folder, DyingNoise.die_at = folder, die_at
    if die_on:
        # "before:put", "after:mark_asked" …: die just before or after that step of the run, the second time
        moment, name = die_on.split(":")
        original, calls = getattr(LabelRun, name), []

        def dying(self, *args, **kwargs):
            calls.append(name)
            last = len(calls) == 2
            if last and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(self, *args, **kwargs)
            if last and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(LabelRun, name, dying)
    data = make_data(batch_size=8)
    teacher = PrivateKNN(9, 0.5, Screening(4, Gaussian(1.0)), Gaussian(sigma=6.0), DyingNoise(1))
    labeling = PrivateLabeler(
        teacher, rounds=2, epochs_per_round=1, queries_per_round=15, max_answers=25, features=torch.nn.Flatten(),
        budget={"delta": 1e-3}, run_dir=folder, options={"query_batch_size": 5, "progress": False},
    )  # fmt: skip
    trainer = quiet_trainer(folder, 2, callbacks=[labeling, RunReport(folder)])
    trainer.fit(small_student(2), data)
