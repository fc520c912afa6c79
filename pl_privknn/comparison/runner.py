"""Runs what a comparison still misses, and never pays twice for the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from pl_privknn._checks import at_most, check_int
from pl_privknn.comparison.results import (
    RESULTS,
    SUMMARY,
    ResultError,
    footnotes,
    read_json,
    result_of,
    write_json,
)
from pl_privknn.comparison.run import Planned, Planner, Run, place_in, runs_of
from pl_privknn.comparison.spec import Comparison, read_epsilon
from pl_privknn.config import ConfigurationError, differences, write_yaml
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.folders import FolderInUse, FolderLock
from pl_privknn.privacy.mechanisms.base import Guarantee

#: What is asked for; written before the run's first start.
CONFIG = "run.yaml"
#: Exit status of a worker whose run another process is working at.
BUSY = 3

#: Does what ``privknn`` does for these words, and returns its exit status.
Command = Callable[[list[str]], int]


def work(folder: Path, command: Command) -> int:
    """Run ``privknn fit`` in ``folder``, or continue what was begun there.

    Returns:
        The exit status; :data:`BUSY` where another process is at it.
    """
    try:
        with FolderLock(folder, shared=True):
            return command(words(folder))
    except FolderInUse:
        print(f"{folder}: another process is at this run; wait for its end, then start the comparison again")
        return BUSY


def words(folder: Path) -> list[str]:
    """Words for ``privknn``: ``--resume`` for a run that may have paid for something, else a first start."""
    begun = any((folder / name).exists() for name in ("labels.sqlite", "ledger.sqlite", "checkpoints"))
    if begun and (folder / "config.yaml").is_file():
        return ["fit", "--resume", str(folder)]
    return ["fit", "--config", str(folder / CONFIG), "--run_dir", str(folder)]


_IDENTITY = "identity.json"
_STATE = "state.json"
_LOG = "run.log"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_GRACE = 20.0  # seconds that an interrupted run has to leave a checkpoint

Words = Sequence[str]
#: Told of each run: what happens ("before" for one that is done already, "start", "done", "failed"), the run, a text.
Report = Callable[[str, Run, str], None]


class FolderError(RuntimeError):
    """The folder holds a run that was started under another configuration."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a comparison.

    Attributes:
        total: chosen runs.
        before: runs that had a result already.
        failed: labels of runs that failed, and why.
    """

    total: int
    before: int
    failed: dict[str, str]


def run_comparison(
    chosen: Sequence[Run],
    output: str | Path,
    *,
    command: Command,
    worker: Words,
    workers: int = 1,
    report: Report = lambda what, run, text: None,
) -> Outcome:
    """Run every chosen run of one comparison that has no result yet.

    A run that was interrupted continues in its folder from its last checkpoint and its ledger. A run that fails
    is written down with its error, and the others go on.

    Args:
        chosen: see :func:`choose`.
        output: the comparison's folder: ``METHOD/eps_ε/seed_N`` for each run, and ``results`` with one JSON each.
        command: does what ``privknn`` does for its words, for runs in this process.
        worker: module that does so for one folder (:func:`~pl_privknn.comparison.runner.work`), for runs in processes
            of their own, and words for it before the folder.
        workers: processes at a time; 0 runs all in this one.
        report: told of what happens.

    Raises:
        ConfigurationError: for a configuration that does not parse.
        FolderError: if a folder holds a run of another configuration.
        FolderInUse: if another process is at the comparison.
    """
    workers, output = check_int("workers", workers, 0), Path(output)
    with FolderLock(output):
        missing = []
        for run in chosen:
            if has_result(run, output):
                report("before", run, "")
            else:
                missing.append(run)
        failed = {}
        if missing:
            planner = Planner()
            for run in {(run.method.name, run.epsilon): run for run in missing}.values():
                planner.check(run)
            failed = _Pool(planner, output, workers, report, command, worker).run(missing)
    return Outcome(len(chosen), len(chosen) - len(missing), failed)


def choose(
    comparison: Comparison,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    epsilons: Sequence[float | str] = (),
) -> list[Run]:
    """The runs of some methods, seeds and values of ε; all by default.

    Raises:
        ConfigurationError: for names, seeds, ε that the comparison has not.
    """
    targets = tuple(read_epsilon("epsilons", epsilon) for epsilon in epsilons)
    every = {epsilon for method in comparison.methods for epsilon in method.epsilons}
    for name, given, known in (
        ("only", only, [method.name for method in comparison.methods]),
        ("seeds", seeds, list(comparison.seeds)),
        ("epsilons", targets, sorted(every)),
    ):
        if unknown := [value for value in given if value not in known]:
            raise ConfigurationError(f"{name}={unknown[0]!r} is not in the comparison, which has {known}")
    chosen = [
        run
        for run in runs_of(comparison)
        if (not only or run.method.name in only)
        and (not seeds or run.seed in seeds)
        and (not targets or run.epsilon in targets)
    ]
    if not chosen:
        raise ConfigurationError(
            "only, seeds, epsilons: no run of the comparison is of all three; leave one out"
        )
    return chosen


def state_of_runs(chosen: Sequence[Run], output: Path) -> Iterator[str]:
    """A line for each chosen run: whether it is done, begun or missing, what was found for it, and its plan's ε."""
    planner = Planner()
    planned: dict[tuple[str, float], str] = {}
    reasons: list[tuple[str, Guarantee]] = []
    for run in chosen:
        begun = (run.folder(output) / _STATE).is_file()
        state = "done" if has_result(run, output) else "begun" if begun else "missing"
        if (key := (run.method.name, run.epsilon)) not in planned:
            planner.check(run)
            plan = planner.plan(run)
            found = [f"{path.rsplit('.', 1)[-1]}={value:g}" for path, value in plan.calibrated.items()]
            if plan.epsilon is not None and plan.guarantee is not None:
                found.append(f"plan ε={at_most(plan.epsilon)}, guarantee: {plan.guarantee.level}")
                reasons.append((run.method.title, plan.guarantee))
            planned[key] = ", ".join(found)
        yield f"{state:8} {run.label:40} {planned[key]}".rstrip()
    yield from footnotes(reasons)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a termination end the runs at work in good order, as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    earlier = signal.signal(signal.SIGTERM, stop) if mine else None
    try:
        yield
    except KeyboardInterrupt:
        raise RuntimeError("interrupted; the same command continues where it stopped") from None
    finally:
        if mine:
            signal.signal(signal.SIGTERM, earlier)


def has_result(run: Run, output: Path) -> bool:
    """Whether a run is done, after a check that what lies in its folder is this run.

    Raises:
        FolderError: if the folder, or the result, is of another configuration.
    """
    folder, result = run.folder(output), output / RESULTS / run.result_name
    identity, now = folder / _IDENTITY, json.loads(json.dumps(run.identity))
    if identity.is_file() and (changes := differences(read_json(identity), now)):
        raise FolderError(
            f"{folder} holds {run.label} of another configuration ({'; '.join(changes)}), and its budget was "
            "spent under that. Restore the configuration, choose another --output, or take the folder and "
            f"{result} away"
        )
    if not result.is_file():
        return False
    if read_json(result).get("fingerprint") != run.fingerprint:
        raise FolderError(
            f"{result} is the result of another configuration; restore that, choose another --output, or take "
            "the file away"
        )
    return True


class _Pool:
    """Some runs at a time, each in a process of its own (or all in this one)."""

    def __init__(
        self, planner: Planner, output: Path, workers: int, report: Report, command: Command, worker: Words
    ) -> None:
        self.planner, self.output, self.workers, self.report = planner, output, workers, report
        self.command, self.worker = command, worker
        self._planning = threading.Lock()
        self._stopped = threading.Event()
        self._processes: set[subprocess.Popen[bytes]] = set()

    def run(self, runs: Sequence[Run]) -> dict[str, str]:
        """Run all; returns the errors of those that failed, by their labels."""
        failed: dict[str, str] = {}
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            try:
                if self.workers == 0:  # in the main thread: Lightning sets signal handlers
                    done = ((run, self._job(run)) for run in runs)
                else:
                    jobs = {pool.submit(self._job, run): run for run in runs}
                    done = ((jobs[job], job.result()) for job in as_completed(jobs))
                for run, error in done:
                    if error is not None:
                        failed[run.label] = error
                        self.report("failed", run, error)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
        return failed

    def _job(self, run: Run) -> str | None:
        """Do one run; returns its error, or None where it has a result."""
        self.report("start", run, "")
        try:
            return self._do(run)
        except (ResultError, OSError, ValueError) as error:
            return str(error)
        except Exception as error:  # one run's fault must not end the comparison
            return f"{type(error).__name__}: {error}"

    def _do(self, run: Run) -> str | None:
        folder = run.folder(self.output)
        with self._planning:
            planned = self._planned(run, folder)
        starts = int(read_json(folder / _STATE).get("starts", 0))
        if read_json(folder / SUMMARY).get("test_accuracy") is None:
            starts += 1
            write_json(folder / _STATE, {"starts": starts, "calibrated": planned.calibrated})
            if error := self._work(folder):
                write_json(folder / "error.json", {"error": error, "starts": starts})
                return error
        result = result_of(run, folder, planned.calibrated, starts)
        write_json(self.output / RESULTS / run.result_name, result)
        (folder / "error.json").unlink(missing_ok=True)
        epsilon = "none"
        if result["epsilon"] is not None:
            epsilon = f"{at_most(result['epsilon'])} (guarantee: {result['guarantee']})"
        self.report(
            "done",
            run,
            f"test accuracy {result['test_accuracy']:.4f}, ε {epsilon}, {result['seconds']:.0f} s",
        )
        return None

    def _planned(self, run: Run, folder: Path) -> Planned:
        """The run's plan; what was found at its first start stays, whatever a later version would find."""
        if (folder / CONFIG).is_file() and (state := read_json(folder / _STATE)):
            return Planned({}, state["calibrated"], None, None)
        planned = self.planner.plan(run)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _IDENTITY, run.identity)
        write_durably(folder / CONFIG, write_yaml(place_in(planned.document, run, folder)))
        return planned

    def _work(self, folder: Path) -> str | None:
        with (folder / _LOG).open("ab") as log:
            start = log.tell()
            status = self._here(folder) if self.workers == 0 else self._process(folder, log.fileno())
        if status == 0:
            return None
        if self._stopped.is_set():
            return "interrupted"
        with (folder / _LOG).open("rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if status == BUSY:
            return last
        if status < 0:
            return f"killed by {signal.Signals(-status).name}; see {folder / _LOG}"
        return f"{last or 'no message'} (exit status {status}; see {folder / _LOG})"

    def _process(self, folder: Path, log: int) -> int:
        threads = str(max(1, (os.cpu_count() or 1) // self.workers))
        environment = {**({} if self.workers == 1 else dict.fromkeys(_THREADS, threads)), **os.environ}
        process = subprocess.Popen(
            [sys.executable, "-m", *self.worker, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        self._processes.add(process)
        try:
            return process.wait()
        finally:
            self._processes.discard(process)

    def _here(self, folder: Path) -> int:
        with (
            (folder / _LOG).open("a", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            try:
                status = work(folder, self.command)
            except SystemExit as stopped:
                status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            except Exception:
                traceback.print_exc()
                status = 1
        if status == 128 + signal.SIGINT:  # Ctrl-C is meant for the comparison, not for one run
            raise KeyboardInterrupt
        return status

    def _stop(self) -> None:
        """End what runs; each run has its checkpoint and its ledger, and continues next time."""
        self._stopped.set()
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        limit = time.monotonic() + _GRACE
        for process in list(self._processes):
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
