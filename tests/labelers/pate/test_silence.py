"""Nothing that is said on the private side reaches a terminal, a log or a child process's output."""

import ctypes
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PATE
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.redaction import SHOW, silenced, terminal
from tests.setup.nearest_teachers import NearestTeachers

CANARY = "record-4711"


def say_everywhere():
    print(CANARY)
    print(CANARY, file=sys.stderr)
    os.write(1, CANARY.encode())
    os.write(2, CANARY.encode())
    ctypes.CDLL(None).printf(f"{CANARY}\n".encode())  # waits in C's own buffer
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(CANARY, stacklevel=1)
    logging.getLogger("some.library").critical(CANARY)
    logging.getLogger("some.library").log(99, CANARY)
    subprocess.run([sys.executable, "-c", f"import sys; print('{CANARY}', file=sys.stderr)"], check=True)


class Talking(NearestTeachers):
    """Teachers that say what they see."""

    def train(self, *given):
        say_everywhere()
        trained = super().train(*given)
        silent = trained.predict

        def predict(queries):
            say_everywhere()
            return silent(queries)

        trained.predict = predict
        return trained


def heard(capfd, caplog, recorded):
    ctypes.CDLL(None).fflush(None)
    out, err = capfd.readouterr()
    return out + err + caplog.text + "".join(str(warning.message) for warning in recorded)


def test_teachers_are_not_heard(capfd, caplog):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, generator=generator), torch.arange(40) % 2
    pate = PATE(2, Talking(), noise=Gaussian(1.0), noise_source=SeededNoise(0))
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        pate.fit(PrivateRecords.of(x, y, 2))
        pate.votes(x)
        assert not pate.trained.failed.any()
        assert CANARY not in heard(capfd, caplog, recorded)
        # They were there to be heard, and are heard where the owner wishes so.
        Talking().train(x, y, y, 2, 2, lambda share: None)
        assert heard(capfd, caplog, recorded).count(CANARY) >= 8


def whisper(stream):
    with silenced():
        with silenced():
            print(CANARY)
        print(CANARY)  # an inner block does not end the outer one
        print("progress", file=stream, flush=True)
        raise ZeroDivisionError


def test_everything_is_as_before_after_a_silence(capfd, caplog, monkeypatch):
    def level():
        return logging.root.manager.disable

    before = (sys.stdout, sys.stderr, level(), warnings.filters[:])
    with terminal() as stream, pytest.raises(ZeroDivisionError):
        whisper(stream)
    assert (sys.stdout, sys.stderr, level(), warnings.filters[:]) == before
    assert heard(capfd, caplog, []) == "progress\n"
    monkeypatch.setenv(SHOW, "1")
    with silenced():
        print(CANARY)
    assert CANARY in heard(capfd, caplog, [])
