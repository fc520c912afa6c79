import os

# Two busy threads on two busy cores can be many times slower than one.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest  # noqa: E402 - the settings above must come first
import torch  # noqa: E402
from long_tests import is_long, unknown  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_everything() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same, without a note of the traceback for devices that are not there
        torch.default_generator.manual_seed(0)


def pytest_make_parametrize_id(config, val, argname):
    """Number parameters that are bytes: gzip writes the time into them, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)  # before marks are chosen by -m
def pytest_collection_modifyitems(config, items):
    """Mark what is long; a name of that list that no test has is an error."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker("long")
    whole_files = not any("::" in argument for argument in config.args)
    if whole_files and (missing := unknown([item.nodeid for item in items])):
        raise pytest.UsageError(f"tests/long_tests.py: no test is named {missing[0]}")


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=2, help="how often each teacher's run is killed (2)")
