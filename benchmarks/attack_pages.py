"""Tables and plots of attacks in docs/guides/attack.md, made from stored results alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.attack_faults import NONE
from benchmarks.attacks import WHOLE_NUMBERS
from benchmarks.faulty import METHODS
from benchmarks.membership import PARTS, RATES
from benchmarks.record import DOCS, entries
from pl_privknn.attacks.guessing import SHARES, Guesses, epsilon_of_guesses
from pl_privknn.attacks.many_runs import STUDENTS
from pl_privknn.attacks.one_run import STUDENT_RUNS
from pl_privknn.privacy.auditing.lower_bound import epsilon_lower_bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FASHION = ", Fashion-MNIST"
_PLACE = DOCS / "guides"


def attacks() -> str:
    """One line a method and ε."""
    found = [one["results"] for one in entries("attacks").values()]
    lines = []
    for one in sorted(found, key=lambda each: (each["method"], each["wanted"])):
        honest, fault = one["honest"], one["half_noise"]
        size = honest["canaries"] if honest["form"] == "one_run" else honest["runs"]
        estimate = honest["epsilon_estimate"]
        breach = honest["smallest_breach"]
        cells = [
            one["method"],
            f"{honest['epsilon']:.2f}",
            honest["released"],
            f"{size:,} canaries" if honest["form"] == "one_run" else f"2 × {size:,} runs",
            _cell(honest, "epsilon_lower", size),
            "–" if estimate is None else f"{estimate:.2f}" + ("" if honest["gaussian"] else " *"),
            _cell(honest, "epsilon_lower_labels", size),
            _cell(honest, "epsilon_lower_student", _student_size(honest)),
            "–" if breach is None else f"{breach:g}" if "breach_power" in honest else f"({breach:g})",
            "–" if one["method"] in WHOLE_NUMBERS else "yes" if fault["violated"] else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    header = (
        "| method | ε | seen | size | bound from what is seen | by way of μ | from labels | from students "
        "| smallest breach | half the noise found |"
    )
    return "\n".join([header, "|" + "---|" * 10, *lines])


def faults() -> str:
    """One line a method and fault, with a cell for each ε."""
    found = [one["results"] for one in entries("attack_faults").values()]
    epsilons = sorted({one["epsilon"] for one in found})
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for one in sorted(found, key=lambda each: (METHODS.index(each["method"]), each["fault"] != NONE)):
        name = one["fault"] if one["size"] == 1 else f"{one['fault']}, {one['size']:g} times"
        cell = f"{one['found']} of {one['of']}"
        if one["fault"] == NONE:
            name = "none"
        elif one["size_found"] is None:
            cell += "" if one["size"] == 1 else "; not at any size"
        elif one["size_found"] != one["size"]:
            cell += f"; all at {one['size_found']:g} times"
        rows.setdefault((one["method"], name), {})[one["epsilon"]] = cell
    header = f"| method | fault | {' | '.join(f'ε = {epsilon:g}' for epsilon in epsilons)} |"
    lines = [
        f"| {method} | {name} | {' | '.join(cells.get(epsilon, '–') for epsilon in epsilons)} |"
        for (method, name), cells in rows.items()
    ]
    return "\n".join([header, "|" + "---|" * (2 + len(epsilons)), *lines])


def _cell(honest: dict[str, Any], name: str, size: int) -> str:
    if honest[name] is None:
        return "–"
    # Canaries of their own places are judged as so many runs, half of them on either side.
    form, count = ("many_runs", size // 2) if honest["labeler"] == "IndKNN" else (honest["form"], size)
    return f"{honest[name]:.2f} ({least_shown(form, count, honest['delta']):.2f})"


def _student_size(honest: dict[str, Any]) -> int:
    if honest["form"] == "many_runs":
        return min(STUDENTS, honest["runs"])
    return honest["canaries"] * min(STUDENT_RUNS, honest["runs"]) // honest["runs"]


@functools.cache
def least_shown(form: str, size: int, delta: float) -> float:
    """The least ε, to 0.01, at which randomised response would give a bound above 0 with so many canaries or runs."""
    for step in range(1, 2000):
        epsilon = step / 100
        right = 1 / (1 + np.exp(-epsilon))
        if form == "one_run":
            made = tuple(round(share * size) for share in SHARES)
            guesses = Guesses(size, made, tuple(int(count * right) for count in made))
            shown = epsilon_of_guesses(guesses, delta=delta, confidence=0.95)
        else:
            runs = np.arange(size + 1)
            present, absent = (np.diff(np.floor(runs * share)) for share in (right, 1 - right))
            shown = epsilon_lower_bound(present, absent, delta=delta, confidence=0.95)
        if shown > 0:
            return epsilon
    return float("inf")


def membership() -> str:
    """One line a network."""
    lines = ["| attacked | test accuracy | TPR at FPR 0.1 % | TPR at FPR 1 % |", "|---|---|---|---|"]
    for part, one in entries("membership").items():
        found = one["results"]
        name = PARTS[part] + (f", ε = {found['epsilon']:g}" if found["epsilon"] else "")
        rates = " | ".join(f"{100 * found['tpr_at_fpr'][str(rate)]:.2f} %" for rate in RATES)
        lines.append(f"| {name} | {found['accuracy']:.3f} | {rates} |")
    return "\n".join(lines)


def draw() -> None:
    """Bounds beside stated ε, and the curves of membership inference, on white so that both themes show them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    found = [one["results"] for one in entries("attacks").values()]
    methods = sorted({one["method"] for one in found})
    families = list(dict.fromkeys(method.removesuffix(_FASHION) for method in methods))
    for method in methods:
        # A bound of 0 has no place on an axis of logarithms.
        points = sorted(
            (one["honest"]["epsilon"], one["honest"]["epsilon_lower"] or float("nan"))
            for one in found
            if one["method"] == method
        )
        number, other = families.index(method.removesuffix(_FASHION)), method.endswith(_FASHION)
        style = {"color": f"C{number}", "marker": "osv^D<>ph*"[number % 10], "label": method}
        axes.plot(
            *zip(*points, strict=True), "--" if other else "-", fillstyle="none" if other else None, **style
        )
    axes.plot([1, 8], [1, 8], ":", color="black", label="stated")
    axes.set(xscale="log", yscale="log", xlabel="stated ε", ylabel="measured lower bound on ε")
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    figure.legend(loc="outside right upper", fontsize="small")
    _save(figure, "attack.svg")
    figure = Figure(figsize=(6.5, 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for part, one in entries("membership").items():
        axes.plot(one["results"]["fpr"], one["results"]["tpr"], label=PARTS[part])
    axes.plot([1e-3, 1], [1e-3, 1], "--", color="gray", label="guessing")
    axes.set(xscale="log", yscale="log", xlabel="false-positive rate", ylabel="true-positive rate")
    axes.legend()
    _save(figure, "membership.svg")


def _save(figure: Figure, name: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same file each time
        figure.savefig(str(_PLACE / name), metadata={"Date": None})
