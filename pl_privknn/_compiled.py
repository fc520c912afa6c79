"""Compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``numba.njit`` that keeps the machine code on disk where it can and holds no lock while it runs."""

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder to keep it in: every process compiles anew
            return numba.njit(nogil=True, **options)(function)

    return compile_
