"""Comparisons: configurations run by ``privknn fit`` at several values of ε and seeds, each run in its own folder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pl_privknn._checks import at_most, check_int
from pl_privknn.comparison.table import Result
from pl_privknn.config import (
    ConfigurationError,
    differences,
    get,
    merged_sections,
    put,
    read_document,
    read_yaml,
    write_yaml,
)
from pl_privknn.planning import default_parameter, private_trainings, solve
from pl_privknn.privacy import Budget
from pl_privknn.privacy.files import FolderLock, write_durably
from pl_privknn.privacy.run import RUN_FILE
from pl_privknn.privacy.verify import epsilon_of_files, ledger_of, mapping_of

#: The comparison with its configurations, in its folder.
COMPARISON = "comparison.yaml"
#: Configuration of a run, written before its start.
CONFIG = "run.yaml"
_BUDGET = ("delta", "adjacency", "unit")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

#: Runs ``privknn`` with these arguments, and returns its exit status.
Command = Callable[[list[str]], int]


# ---------------------------------------------------------------------------- the file


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison, as stated in its YAML; docs/guides/comparison.md explains each key.

    Attributes:
        name: names the folder ``runs/compare/NAME``.
        budget: δ, neighbouring relation and unit of privacy of every run.
        seeds: one run each.
        epsilons: target values of ε.
        methods: ``title``, ``config``, ``set`` and ``at`` of each method.
    """

    name: str
    budget: dict[str, Any]
    seeds: list[int]
    epsilons: list[float]
    methods: dict[str, dict[str, Any]]

    def cells(self) -> list[Cell]:
        """All runs, seed by seed, so that the first seed gives a complete comparison.

        Raises:
            ConfigurationError: for methods on different data.
            ValueError: for an override within a value that is no section.
        """
        found = []
        for seed, (name, method) in itertools.product(self.seeds, self.methods.items()):
            bound = [math.inf] if math.inf in method["at"] else []
            private = _spender(_overridden(method["config"], method["set"])) is not None
            for epsilon in [*self.epsilons, *bound] if private else [math.inf]:
                own = method["at"].get(epsilon, {})
                document = self._document(_overridden(method["config"], method["set"], own), epsilon, seed)
                found.append(Cell(name, method["title"], epsilon, seed, document, own))
        for cell in found[1:]:
            if changes := differences(found[0].data, cell.data, "data"):
                raise ConfigurationError(
                    f"methods.{cell.method} must have the data of {found[0].method} ({'; '.join(changes)})"
                )
        return found

    def _document(self, document: dict[str, Any], epsilon: float, seed: int) -> dict[str, Any]:
        """Configuration with the seed and the budget that all methods have."""
        spender = _spender(document)
        put(document, "seed_everything", seed)
        if spender != "labeling.labeler":
            document.pop("labeling", None)
            budget = f"{spender}.init_args.budget"
        else:
            put(document, "labeling.options.seed", seed)
            budget = "labeling.budget"
            if get(document, f"{spender}.init_args.budget") is not None:  # it would precede that of the run
                put(document, f"{spender}.init_args.budget", None)
        if spender is not None:
            target = {"epsilon": epsilon} if epsilon < math.inf else {}
            put(document, budget, {**(get(document, budget) or {}), **self.budget, **target})
        return document


def read_comparison(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Comparison:
    """Read and check the YAML of a comparison.

    Args:
        path: the file, whose name is that of the comparison.
        overrides: settings of all runs by dotted path, as in ``trainer.max_epochs``.

    Raises:
        ConfigurationError: for a key that is missing, unknown or has a bad value.
        FileNotFoundError: if it, or a configuration that it names, does not exist.
    """
    path = Path(path)
    document = read_document(path)
    try:
        return comparison_of(document, path.stem, path.parent, overrides)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def comparison_of(
    document: Any, name: str, folder: Path = Path(), overrides: Mapping[str, Any] | None = None
) -> Comparison:
    """Comparison from plain types; see :func:`read_comparison`.

    Args:
        document: the parsed YAML.
        name: of the comparison.
        folder: where the configurations lie that it names.
        overrides: see :func:`read_comparison`.
    """
    known = ("config", "budget", "seeds", "epsilons", "methods")
    top = _section("the comparison", document, known, needed=("epsilons", "methods"))
    methods, changed = {}, dict(overrides or {})
    for key, given in _section("methods", top["methods"]).items():
        where = f"methods.{key}"
        if not _NAME.fullmatch(str(key)):
            raise ConfigurationError(f"{where} names a folder; use letters, digits, '.', '_' and '-'")
        method = _section(where, given, ("title", "config", "set", "at"))
        config = method.get("config", top.get("config"))
        if isinstance(config, str):
            config = read_document(folder / config)
        methods[str(key)] = {
            "title": str(method.get("title", key)),
            "config": _section(f"{where}.config", config, needed=("data",)),
            "set": _section(f"{where}.set", method.get("set")) | changed,
            "at": {
                read_epsilon(f"{where}.at", epsilon): _section(f"{where}.at.{epsilon}", settings) | changed
                for epsilon, settings in _section(f"{where}.at", method.get("at")).items()
            },
        }
    budget = dataclasses.asdict(Budget(**_section("budget", top.get("budget"), _BUDGET)))
    epsilons = _list("epsilons", top["epsilons"])
    seeds = _list("seeds", top.get("seeds", [0, 1, 2]))
    return Comparison(
        name=name,
        budget={name: budget[name] for name in _BUDGET},
        seeds=[check_int("seeds", seed, 0) for seed in seeds],
        epsilons=sorted(read_epsilon("epsilons", epsilon) for epsilon in epsilons),
        methods=methods,
    )


def read_epsilon(where: str, value: Any) -> float:
    """Parse an ε above 0, or the word ``inf``.

    Raises:
        ConfigurationError: otherwise.
    """
    with contextlib.suppress(TypeError, ValueError):
        if (number := float(value)) > 0:
            return number
    raise ConfigurationError(f"{where}: ε={value!r} must be a number above 0, or inf (no privacy)")


def _section(
    where: str, given: Any, known: Collection[str] = (), needed: Collection[str] = ()
) -> dict[str, Any]:
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where}: {given!r} must be a section with keys")
    if unknown := [key for key in given if known and key not in known]:
        raise ConfigurationError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    if missing := [key for key in needed if key not in given]:
        raise ConfigurationError(f"{where} has no {missing[0]!r}; add it")
    return given


def _list(where: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not given or len(set(map(str, given))) < len(given):
        raise ConfigurationError(f"{where}={given!r} must be a list of at least one value, each once")
    return given


def _overridden(config: Mapping[str, Any], *overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a configuration with other values at dotted paths."""
    document = merged_sections(config, None)
    for path, value in itertools.chain.from_iterable(each.items() for each in overrides):
        put(document, path, value)
    return document


def _spender(document: Mapping[str, Any]) -> str | None:
    """Dotted path of the teacher or private training; None where there is none."""
    if get(document, "labeling.labeler") is not None:
        return "labeling.labeler"
    return next(private_trainings(document), None)


# ---------------------------------------------------------------------------- one run


@dataclasses.dataclass(frozen=True)
class Cell:
    """Run of one method at one ε with one seed.

    Attributes:
        method: name of the method.
        title: name of the method in tables and plots.
        epsilon: target ε, ``math.inf`` for none.
        seed: of training and query selection.
        document: configuration of ``privknn fit``, before calibration.
        own: settings that the method states for this ε, by dotted path.
    """

    method: str
    title: str
    epsilon: float
    seed: int
    document: dict[str, Any] = dataclasses.field(repr=False)
    own: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"{self.method} ε={self.epsilon:g} seed {self.seed}"

    @property
    def data(self) -> dict[str, Any]:
        """Section of the data, without the option to train on the truth of public examples."""
        return _overridden(self.document["data"], {"init_args.train_on_truth": None})

    def folder(self, output: Path) -> Path:
        """Folder of the run, within the comparison's folder."""
        return output / self.method / f"eps_{self.epsilon:g}" / f"seed_{self.seed}"

    def calibrated(self) -> Mapping[str, float]:
        """Noise that meets the target ε, by dotted path; empty where the class sets it or the method states it.

        Raises:
            ConfigurationError: where no allowed value meets the target, or there is no setting to calibrate.
        """
        if self.epsilon == math.inf:
            return {}
        source = f"methods.{self.method} at ε={self.epsilon:g}"
        try:
            parameter = default_parameter(self.document, own_code=True)
            if parameter.endswith("budget.epsilon") or get(_overridden({}, self.own), parameter) is not None:
                return {}
            return solve(self.document, None, self.epsilon, exact=False, source=source, own_code=True).values
        except (ValueError, OverflowError) as error:
            raise ConfigurationError(f"{source}: {error}") from error

    def begun(self, output: Path) -> bool:
        """Whether the run may have spent budget.

        Raises:
            ConfigurationError: if its folder holds a run of another configuration.
        """
        folder = self.folder(output)
        files = (RUN_FILE, "checkpoints", "summary.json")
        if not any((folder / name).exists() for name in files):
            return False
        if changes := differences(mapping_of(folder / CONFIG), read_yaml(write_yaml(self.document))):
            raise ConfigurationError(
                f"{folder} holds {self.label} of another configuration ({'; '.join(changes)}), which may have spent "
                "its budget; restore that, choose another --output, or remove the folder"
            )
        return True

    def result(self, output: Path) -> Result | None:
        """Result of the run; None where it is not finished."""
        summary = mapping_of(self.folder(output) / "summary.json")
        if summary.get("test_accuracy") is None:
            return None
        return Result(self.method, self.title, self.epsilon, self.seed, summary)


# ---------------------------------------------------------------------------- all runs


def choose(comparison: Comparison, **wanted: Collection[Any]) -> list[Cell]:
    """Runs of given methods, seeds and values of ε; all by default.

    Args:
        comparison: the comparison.
        **wanted: allowed values of ``method``, ``seed`` and ``epsilon``; empty for all.

    Raises:
        ConfigurationError: for values that are not in the comparison, or that no run has together.
    """
    chosen = comparison.cells()
    for name, given in wanted.items():
        known = list(dict.fromkeys(getattr(cell, name) for cell in chosen))
        if unknown := [value for value in given if value not in known]:
            raise ConfigurationError(f"{name} {unknown[0]!r} is in none of the runs, which have {known}")
        chosen = [cell for cell in chosen if not given or getattr(cell, name) in given]
    return chosen


def states_of(cells: Sequence[Cell], output: Path) -> Iterator[str]:
    """One line per run: done, begun or missing, and its calibrated noise."""
    noise = _calibrated(cells)
    for cell in cells:
        state = "missing" if not cell.begun(output) else "done" if cell.result(output) else "begun"
        found = [f"{path.rsplit('.', 1)[-1]}={value:g}" for path, value in noise[cell.label].items()]
        yield f"{state:8} {cell.label:40} {', '.join(found)}".rstrip()


def _calibrated(cells: Sequence[Cell]) -> dict[str, Mapping[str, float]]:
    """Calibrated noise of each run by label; seeds have no influence on it."""
    known: dict[tuple[str, float], Mapping[str, float]] = {}
    for cell in cells:
        if (cell.method, cell.epsilon) not in known:
            known[cell.method, cell.epsilon] = cell.calibrated()
    return {cell.label: known[cell.method, cell.epsilon] for cell in cells}


def run_comparison(
    comparison: Comparison,
    cells: Sequence[Cell],
    output: Path,
    *,
    command: Command,
    folder: Path | None = None,
    workers: int = 1,
    finished: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Run every given run that is not finished, and print a line for each start and end.

    A run that was interrupted continues as by ``privknn fit --resume``. After a failed run the others continue.

    Args:
        comparison: the comparison.
        cells: its runs; see :func:`choose`.
        output: the comparison's folder.
        command: runs ``privknn`` in this process.
        folder: where separate processes find modules that configurations name, after installed ones.
        workers: number of parallel processes; 0 runs all in this process.
        finished: called after each run with a result, by one thread at a time.

    Returns:
        The number of runs that were finished before, and the number that failed.

    Raises:
        ConfigurationError: where no noise meets an ε, or a folder holds a run of another configuration.
        FolderInUse: if another process runs the comparison.
    """
    check_int("workers", workers, 0)

    def start(words: list[str], log: Path) -> int:
        return _run_here(command, words, log) if workers == 0 else _run_beside(words, log, folder, workers)

    def run(cell: Cell) -> bool:
        print(f"start: {cell.label}", flush=True)
        try:
            said = f"done: {cell.label}: {_fit(cell, output, noise.get(cell.label), start)}"
        except (RuntimeError, OSError, ValueError) as error:
            said = f"failed: {cell.label}: {error}"
        print(said, flush=True)
        if is_done := said.startswith("done"):
            with one_at_a_time:
                finished()
        return is_done

    one_at_a_time = threading.Lock()
    with FolderLock(output), ThreadPoolExecutor(max(1, workers)) as pool:
        begun = {cell.label for cell in cells if cell.begun(output)}
        missing = [cell for cell in cells if cell.result(output) is None]
        noise = _calibrated([cell for cell in missing if cell.label not in begun])
        plain = dataclasses.asdict(comparison)
        del plain["name"]
        write_durably(output / COMPARISON, write_yaml(plain))
        try:  # the main thread runs what is run here, since Lightning sets signal handlers
            done = list(map(run, missing) if workers == 0 else pool.map(run, missing))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(cells) - len(missing), done.count(False)


def _fit(
    cell: Cell, output: Path, noise: Mapping[str, float] | None, start: Callable[[list[str], Path], int]
) -> str:
    """Run ``privknn fit`` in the run's folder, or resume the run there where ``noise`` is None.

    Returns:
        The outcome in words.

    Raises:
        RuntimeError: where the run ended without a result.
    """
    folder = cell.folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    words, log = ["--resume", str(folder)], folder / "run.log"
    if noise is not None:
        write_durably(folder / CONFIG, write_yaml(cell.document))
        settings = [f"--{path}={value!r}" for path, value in noise.items()]
        words = ["--config", str(folder / CONFIG), "--run_dir", str(folder), *settings]
    status = start(["fit", *words, *_QUIET], log)
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        raise RuntimeError(f"{last} (exit status {status}; see {log})")
    if (result := cell.result(output)) is None:
        raise RuntimeError("the run left no accuracy on the test set; the data module needs a test set")
    values, epsilon = result.values, "none"
    if values["epsilon"] is not None:
        epsilon = f"{at_most(values['epsilon'])} ({at_most(values['epsilon_spent'])} spent)"
    return f"test accuracy {result.accuracy:.4f}, ε {epsilon}, guarantee: {result.guarantee.level}"


def _run_here(command: Command, words: list[str], log: Path) -> int:
    """Execute a command in this process, with its output in the run's log."""
    with (
        log.open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            status = command(words)
        except Exception:
            traceback.print_exc()
            status = 1
    if status == 128 + signal.SIGINT:  # Ctrl-C is meant for the comparison, not for one run
        raise KeyboardInterrupt
    return status


def _run_beside(words: list[str], log: Path, folder: Path | None, workers: int) -> int:
    """Execute a command in a separate process, with its output in the run's log."""
    threads = dict.fromkeys(_THREADS, str(max(1, (os.cpu_count() or 1) // workers)))
    places = [os.environ.get("PYTHONPATH"), None if folder is None else str(folder.resolve())]
    with log.open("ab") as file:
        return subprocess.run(
            [sys.executable, "-m", "pl_privknn.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={
                **(threads if workers > 1 else {}),
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
            },
            check=False,
        ).returncode


# ---------------------------------------------------------------------------- results


def read_results(folder: str | Path) -> list[Result]:
    """Results of the finished runs in a comparison's folder, by seed, in the comparison's order.

    Raises:
        FileNotFoundError: if it is no comparison's folder.
    """
    found = (cell.result(Path(folder)) for cell in read_comparison(Path(folder) / COMPARISON).cells())
    return [result for result in found if result is not None]


def total_of(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """Sentence with the sums of ε and δ over private runs: an upper bound on their joint cost."""
    epsilons = [cell.epsilon for cell in cells if cell.epsilon < math.inf]
    delta = len(epsilons) * comparison.budget["delta"]
    return (
        f"All {len(epsilons)} private runs together: ε at most {at_most(sum(epsilons))} at δ {delta:g} (their sum), "
        "whichever model is released. The choice among them by public validation or test examples costs nothing more."
    )


def joint_cost(folder: str | Path) -> str:
    """Sentence on the joint privacy cost of all runs in a comparison's folder, which share their private records."""
    comparison, private = read_comparison(Path(folder) / COMPARISON), {}
    for cell in comparison.cells():
        place = cell.folder(Path(folder))
        if (ledger := ledger_of(place)) is not None:
            private[ledger] = cell.epsilon < math.inf
    ledgers = [ledger for ledger, counted in private.items() if counted]
    if not ledgers:
        return "No run has been charged."
    total = epsilon_of_files(ledgers, comparison.budget["delta"], exact=False)
    reason = f" ({total['reason']})" if total["reason"] else ""
    without = " Runs without privacy come on top of that: on real records they void any guarantee."
    return (
        f"All runs together, on the same private records: ε ≤ {at_most(total['epsilon'])} at δ = {total['delta']:g}, "
        f"guarantee: {total['guarantee']}{reason}.{without if len(ledgers) < len(private) else ''}"
    )
