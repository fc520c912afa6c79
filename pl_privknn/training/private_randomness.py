"""Secret seeds of the global generators during private steps."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


class PrivateRandomness:
    """Context with secretly seeded global generators of torch, numpy and Python, restored afterwards.

    What a record draws must not depend on which others are there, and must not be known.

    Args:
        seed: gives 63-bit seeds; the operating system's generator by default.

    Attributes:
        drew: whether something was drawn since it was set to False; None where nothing looks.
    """

    def __init__(self, seed: Callable[[], int] | None = None) -> None:
        self.seed = seed if seed is not None else lambda: secrets.randbits(63)
        self.drew: bool | None = None
        self._mark: Any = None

    def begin(self, seed: int | None = None) -> None:
        """Seed the generators anew."""
        if self.drew is not None and self._mark is not None:
            self.drew |= self.drawn()
        seed = self.seed() if seed is None else seed
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._mark = None if self.drew is None else generator_states()

    def drawn(self) -> bool:
        """Whether a random number was drawn since the last seeding."""
        return self._mark != generator_states()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the generators are seeded secretly."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        numbers, theirs = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices):
            try:
                self._mark = None
                self.begin()
                yield
            finally:
                if self.drew is not None:
                    self.drew |= self.drawn()
                np.random.set_state(numbers)
                random.setstate(theirs)


def generator_states() -> tuple[Any, ...]:
    """States of the global generators."""
    words: Any = np.random.get_state()
    return (
        torch.random.get_rng_state().numpy().tobytes(),
        words[1].tobytes(),
        words[2:],
        random.getstate(),
    )
