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
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same, without a note of the traceback for devices that are not there
        torch.default_generator.manual_seed(0)


def pytest_make_parametrize_id(config, val, argname):
    """Number parameters that are bytes: gzip writes the time into them, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)  # before marks are chosen by -m
def pytest_collection_modifyitems(config, items):
    """``@pytest.mark.long("one", "two")`` marks a test's cases of these names alone; without names it marks all."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is None or not mark.args:
            continue
        named = unknown.setdefault(item.nodeid.split("[")[0], set(mark.args))
        named.discard(item.callspec.id)
        if item.callspec.id not in mark.args:
            item.own_markers = [other for other in item.own_markers if other.name != "long"]
    stale = {test: sorted(names) for test, names in unknown.items() if names}
    if stale and not any("::" in argument for argument in config.args):  # then all cases were collected
        raise pytest.UsageError(f"marks of long name cases that do not exist: {stale}")


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=2, help="how often each teacher's run is killed (2)")
