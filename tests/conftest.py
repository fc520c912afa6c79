import os

# Two busy threads on two busy cores can be many times slower than one.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest  # noqa: E402 - the settings above must come first
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_everything() -> None:
    torch.manual_seed(0)


def pytest_make_parametrize_id(config, val, argname):
    """Number parameters that are bytes: gzip writes the time into them, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=2, help="how often each teacher's run is killed (2)")
