"""Which commit of the source is running."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def source_commit() -> str | None:
    """The checkout's commit, with ``-dirty`` behind it where files differ; None for an installed package."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # a repository around an installation is somebody else's
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
