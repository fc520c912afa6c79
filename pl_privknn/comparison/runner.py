"""Execution of a comparison's missing runs; resumed runs are not charged again."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
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
    result_of,
    write_json,
)
from pl_privknn.comparison.run import Planner, Run, runs_of, with_run_settings, with_values
from pl_privknn.comparison.spec import Comparison, read_epsilon
from pl_privknn.config import ConfigurationError, differences, write_yaml
from pl_privknn.privacy.audit import mapping_of
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.folders import FolderInUse, FolderLock
from pl_privknn.privacy.mechanisms.base import Guarantee

#: Requested configuration, written before the run's first start.
CONFIG = "run.yaml"
#: Exit status of a worker whose run is in use by another process.
BUSY = 3
_STATE = "state.json"
_LOG = "run.log"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

#: Runs ``privknn`` with these arguments, and returns its exit status.
Command = Callable[[list[str]], int]
#: Called for each run with the event ("start", "done", "failed"), the run and a text.
Report = Callable[[str, Run, str], None]


class FolderError(RuntimeError):
    """Raised where a folder holds a run of another configuration."""


def work(folder: Path, command: Command) -> int:
    """Run ``privknn fit`` in ``folder``, or resume the run in it.

    Returns:
        The exit status; :data:`BUSY` where another process uses the folder.
    """
    begun = any((folder / name).exists() for name in ("labels.sqlite", "ledger.sqlite", "checkpoints"))
    words = ["fit", "--config", str(folder / CONFIG), "--run_dir", str(folder)]
    if begun and (folder / "config.yaml").is_file():  # it may have spent budget
        words = ["fit", "--resume", str(folder)]
    try:
        with FolderLock(folder, shared=True):
            return command(words)
    except FolderInUse:
        print(
            f"{folder}: another process is working on this run; wait until it ends, then start the comparison again"
        )
        return BUSY


def run_comparison(
    chosen: Sequence[Run],
    output: Path,
    *,
    command: Command,
    worker: Sequence[str],
    workers: int = 1,
    report: Report = lambda what, run, text: None,
) -> tuple[int, dict[str, str]]:
    """Run every chosen run of one comparison that has no result yet.

    A run that was interrupted continues in its folder from its last checkpoint and its ledger. The error of a
    failed run is stored, and the other runs continue.

    Args:
        chosen: see :func:`choose`.
        output: the comparison's folder: ``METHOD/eps_ε/seed_N`` for each run, and ``results`` with one JSON each.
        command: runs ``privknn`` with given arguments, for runs in this process.
        worker: module that does so for one folder (:func:`work`), for runs in separate processes, and its arguments
            before the folder.
        workers: number of parallel processes; 0 runs all in this process.
        report: called for each start and end of a run.

    Returns:
        The number of runs that already had a result, and the errors of failed runs by label.

    Raises:
        ConfigurationError: for a configuration that does not parse, or whose plan exceeds its ε.
        FolderError: if a folder holds a run of another configuration.
        FolderInUse: if another process runs the comparison.
    """
    workers = check_int("workers", workers, 0)
    failed: dict[str, str] = {}
    processes: set[subprocess.Popen[bytes]] = set()
    start = (
        functools.partial(_process, worker, workers, processes)
        if workers
        else functools.partial(_here, command)
    )
    with FolderLock(output), ThreadPoolExecutor(max(1, workers)) as pool:
        missing = [run for run in chosen if not has_result(run, output)]
        planner = Planner()
        for run in missing:
            planner.check(run)
        for run in missing:  # before any budget is spent
            if not (run.folder(output) / _STATE).is_file():
                planner.plan(run)
        do = functools.partial(_do, output=output, planner=planner, start=start, report=report)
        try:
            if workers == 0:  # in the main thread: Lightning sets signal handlers
                done = ((run, do(run)) for run in missing)
            else:
                jobs = {pool.submit(do, run): run for run in missing}
                done = ((jobs[job], job.result()) for job in as_completed(jobs))
            for run, error in done:
                if error is not None:
                    failed[run.label] = error
                    report("failed", run, error)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(processes):  # each leaves its checkpoint and ledger, and continues next time
                process.send_signal(signal.SIGINT)
            raise
    return len(chosen) - len(missing), failed


def choose(
    comparison: Comparison,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    epsilons: Sequence[float | str] = (),
) -> list[Run]:
    """Runs of the given methods, seeds and values of ε; all by default.

    Raises:
        ConfigurationError: for names, seeds or ε that are not in the comparison.
    """
    targets = [read_epsilon("epsilons", epsilon) for epsilon in epsilons]
    every = chosen = list(runs_of(comparison))
    wanted: tuple[tuple[str, Sequence[object], Callable[[Run], object]], ...] = (
        ("only", only, lambda run: run.method.name),
        ("seeds", seeds, lambda run: run.seed),
        ("epsilons", targets, lambda run: run.epsilon),
    )
    for name, given, of in wanted:
        known = list(dict.fromkeys(map(of, every)))
        if unknown := [value for value in given if value not in known]:
            raise ConfigurationError(f"{name}={unknown[0]!r} is not in the comparison, which has {known}")
        chosen = [run for run in chosen if not given or of(run) in given]
    if not chosen:
        raise ConfigurationError(
            "only, seeds, epsilons: no run of the comparison matches all three; leave out one of them"
        )
    return chosen


def state_of_runs(chosen: Sequence[Run], output: Path) -> Iterator[str]:
    """One line per chosen run: done, begun or missing, its calibrated settings and the ε of its plan."""
    planner = Planner()
    reasons: list[tuple[str, Guarantee]] = []
    for run in chosen:
        begun = (run.folder(output) / _STATE).is_file()
        state = "done" if has_result(run, output) else "begun" if begun else "missing"
        planner.check(run)
        plan = planner.plan(run)
        found = [f"{path.rsplit('.', 1)[-1]}={value:g}" for path, value in plan.calibrated.items()]
        if plan.epsilon is not None and plan.guarantee is not None:
            found.append(f"plan ε={at_most(plan.epsilon)}, guarantee: {plan.guarantee.level}")
            reasons.append((run.method.title, plan.guarantee))
        yield f"{state:8} {run.label:40} {', '.join(found)}".rstrip()
    yield from footnotes(reasons)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle a termination signal as Ctrl-C: running runs stop and can be resumed."""

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
    """Whether a run has a result, after a check that its folder holds this run.

    Raises:
        FolderError: if the folder, or the result, is of another configuration.
    """
    folder, result = run.folder(output), output / RESULTS / run.result_name
    now = json.loads(json.dumps(run.identity))
    if (state := mapping_of(folder / _STATE)) and (changes := differences(state.get("identity"), now)):
        raise FolderError(
            f"{folder} holds {run.label} of another configuration ({'; '.join(changes)}), and its budget was "
            "spent under that. Restore the configuration, choose another --output, or remove the folder and "
            f"{result}"
        )
    if result.is_file() and mapping_of(result).get("fingerprint") != run.fingerprint:
        raise FolderError(
            f"{result} is the result of another configuration; restore that, choose another --output, or "
            "remove the file"
        )
    return result.is_file()


def _do(run: Run, output: Path, planner: Planner, start: Callable[[Path], int], report: Report) -> str | None:
    """Execute one run; returns its error, or None where it has a result."""
    report("start", run, "")
    folder = run.folder(output)
    try:
        # Settings calibrated at the first start are kept, even if a later version finds others.
        state = mapping_of(folder / _STATE) or {"calibrated": planner.plan(run).calibrated, "starts": 0}
        if mapping_of(folder / SUMMARY).get("test_accuracy") is None:
            state |= {"identity": run.identity, "starts": state["starts"] + 1}
            write_json(folder / _STATE, state)
            document = with_values(run.document, state["calibrated"])
            write_durably(folder / CONFIG, write_yaml(with_run_settings(document, run, folder)))
            if error := _work(folder, start):
                write_json(folder / "error.json", {"error": error, "starts": state["starts"]})
                return error
        result = result_of(run, folder, state["calibrated"], state["starts"])
        write_json(output / RESULTS / run.result_name, result)
        (folder / "error.json").unlink(missing_ok=True)
    except Exception as error:  # one run's fault must not end the comparison
        expected = isinstance(error, ResultError | OSError | ValueError)
        return str(error) if expected else f"{type(error).__name__}: {error}"
    epsilon = "none"
    if result["epsilon"] is not None:
        epsilon = f"{at_most(result['epsilon'])} (guarantee: {result['guarantee']})"
    report(
        "done", run, f"test accuracy {result['test_accuracy']:.4f}, ε {epsilon}, {result['seconds']:.0f} s"
    )
    return None


def _work(folder: Path, start: Callable[[Path], int]) -> str | None:
    """Start the run of a folder; returns the last line of its log on failure."""
    log = folder / _LOG
    before = log.stat().st_size if log.is_file() else 0
    if (status := start(folder)) == 0:
        return None
    if status == -signal.SIGINT:
        return "interrupted"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}; see {log}"
    lines = log.read_bytes()[before:].decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return last if status == BUSY else f"{last} (exit status {status}; see {log})"


def _process(
    worker: Sequence[str], workers: int, processes: set[subprocess.Popen[bytes]], folder: Path
) -> int:
    """Execute a run in a separate process, listed in ``processes`` until it ends."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {**({} if workers == 1 else dict.fromkeys(_THREADS, threads)), **os.environ}
    words = [sys.executable, "-m", *worker, str(folder)]
    with (folder / _LOG).open("ab") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    processes.add(process)
    try:
        return process.wait()
    finally:
        processes.discard(process)


def _here(command: Command, folder: Path) -> int:
    """Execute a run in this process, with its output in the run's log."""
    with (
        (folder / _LOG).open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            status = work(folder, command)
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        except Exception:
            traceback.print_exc()
            status = 1
    if status == 128 + signal.SIGINT:  # Ctrl-C is meant for the comparison, not for one run
        raise KeyboardInterrupt
    return status
