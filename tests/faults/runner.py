"""Puts faults into a scratch copy of the package, one at a time, and runs the tests that have to notice them."""

from __future__ import annotations

import compileall
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from .fault import PACKAGE, Fault, FaultError

ROOT = Path(__file__).resolve().parents[2]
#: Tests that run longer than this are given up; that does not count as noticing.
SECONDS = 240
#: Imported once, before processes are forked, for they take longer than most tests.
_HEAVY = (
    "torch",
    "torchvision",
    "pytorch_lightning",
    "torchmetrics.classification",
    "jsonargparse",
    "dp_accounting.pld.privacy_loss_distribution",
    "dp_accounting.rdp",
    "scipy.stats",
    "scipy.optimize",
    "sklearn.linear_model",
    "sklearn.cluster",
    "hypothesis",
    "numba",
    "opacus.validators",
    "opacus.grad_sample",
    "matplotlib.pyplot",
    "faiss",
)
#: A "fault" that ends in one of these is a slip of the catalogue.
_SLIPS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one fault, or of tests without a fault.

    Attributes:
        name: of the fault.
        caught: whether a test failed.
        by: the test that failed, or why none did.
        seconds: that it took.
    """

    name: str
    caught: bool
    by: str
    seconds: float


class Trials:
    """Processes that have torch and its like in memory, each with a scratch tree of its own.

    A scratch tree holds a copy of the package, and links to everything else of the checkout, which is never written
    to. A fault is put into the copy; a forked process imports it from there, runs the tests, and ends.

    Args:
        processes: how many faults at a time.
    """

    def __init__(self, processes: int = 2) -> None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ.setdefault(variable, "1")
        for name in _HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        assert PACKAGE not in sys.modules, "the package must not be imported before a fault is put into it"
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(processes, fork, _start, (self._folder.name,))

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def without(self, faults: Sequence[Fault]) -> Iterator[Outcome]:
        """The tests of all faults on the code as it is, a file at a time; ``caught`` says that one failed."""
        files: dict[str, dict[str, None]] = {}
        for fault in faults:
            for name in fault.tests:
                files.setdefault(name.partition("::")[0], {})[name] = None
        clean = [Fault(file, "none", "", {}, tuple(names)) for file, names in files.items()]
        yield from self._spread(_run, clean)

    def of(self, faults: Sequence[Fault]) -> Iterator[Outcome]:
        """Try each fault; outcomes come in the order in which they are known."""
        yield from self._spread(_try, faults)

    def _spread(self, tried: Callable[[Fault], Outcome], faults: Sequence[Fault]) -> Iterator[Outcome]:
        for future in as_completed([self._pool.submit(tried, fault) for fault in faults]):
            yield future.result()


_scratch = Path()


def _start(folder: str) -> None:
    """Make this process's own tree."""
    global _scratch
    _scratch = Path(folder) / str(os.getpid())
    _scratch.mkdir()
    shutil.copytree(ROOT / PACKAGE, _scratch / PACKAGE)  # its links are followed
    compileall.compile_dir(_scratch / PACKAGE, quiet=2)
    for entry in ROOT.iterdir():
        if entry.name != PACKAGE and not entry.name.startswith("."):
            (_scratch / entry.name).symlink_to(entry)


def _try(fault: Fault) -> Outcome:
    try:
        path = fault.source(_scratch)
        kept = path.with_suffix(".kept")
        shutil.copy2(path, kept)
        try:
            path.write_text(fault.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
            return _run(fault)
        finally:
            shutil.move(kept, path)  # with its old time, so that what was compiled from it stays valid
    except FaultError as error:
        return Outcome(fault.name, False, str(error), 0.0)


def _run(fault: Fault) -> Outcome:
    """Run the fault's tests in a forked process, which imports the package from the scratch tree."""
    start = time.monotonic()
    report, log = _scratch / "report.json", _scratch / "log.txt"
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # so that processes that a test has started end with it
            _child(fault, report, log)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    late = _wait(child)
    seconds = time.monotonic() - start
    if late:
        return Outcome(fault.name, False, f"no result within {SECONDS} s", seconds)
    if not report.exists():
        return Outcome(fault.name, False, f"the tests died: {log.read_text()[-500:]}", seconds)
    return Outcome(fault.name, *_verdict(json.loads(report.read_text())), seconds)


def _wait(child: int) -> bool:
    """Wait for a process and end whatever it leaves; whether it took too long."""
    end = time.monotonic() + SECONDS
    late = False
    while not late and os.waitpid(child, os.WNOHANG) == (0, 0):
        late = time.monotonic() > end
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if late:
        os.waitpid(child, 0)
    return late


def _verdict(found: dict[str, Any]) -> tuple[bool, str]:
    if found["status"] == pytest.ExitCode.OK:
        return False, "every test passed"
    if "test" not in found:
        return False, f"pytest ended with status {found['status']}"
    if found["error"] in _SLIPS:
        return False, f"{found['error']} in {found['test']}: a slip, not a fault"
    return True, found["test"]


def _child(fault: Fault, report: Path, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(_scratch)
    sys.path.insert(0, str(_scratch))
    os.environ["PYTHONPATH"] = str(_scratch)  # for the processes that tests start
    # Nothing that was compiled from a faulty source may stay.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    notes = _Notes()
    with tempfile.TemporaryDirectory(dir=_scratch) as folder:
        words = ["--exitfirst", "--quiet", "-m", "", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        words += ["--rootdir", str(_scratch), "-c", str(_scratch / "pyproject.toml")]
        status = pytest.main([*words, *fault.node_ids(_scratch / "tests")], plugins=[notes])
    origin = getattr(sys.modules.get(PACKAGE), "__file__", None) or _scratch
    assert Path(origin).is_relative_to(_scratch), f"the package came from {origin}"
    report.write_text(json.dumps({"status": int(status), **notes.first}))


class _Notes:
    """A plugin of pytest that notes the first test that fails."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Note a failure."""
        assert call.excinfo is not None
        self.first = self.first or {"test": node.nodeid, "error": call.excinfo.type.__name__}
