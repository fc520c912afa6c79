"""Tables and plots of docs/methods/ind_knn.md from stored results, so that none differs from what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.ind_knn_features import FEATURES
from benchmarks.record import DOCS, entries, results
from pl_privknn.comparison.marks import footnotes, guarantee_of, mark
from pl_privknn.comparison.plot import explain
from pl_privknn.privacy.mechanisms.base import Guarantee, weakest

PAGE = DOCS / "methods" / "ind_knn.md"
METHODS = {
    "density": "Ind-KNN, density",
    "fixed": "Ind-KNN, one τ",
    "private_knn": "Private-kNN, in hindsight",
}
CONVERSION_NAMES = {"rdp": "improved RDP", "rdp_classic": "classic RDP"}


def accuracy_rows() -> dict[tuple[str, int, float, str, str], dict[str, Any]]:
    """Rows by features, queries, ε, method and accounting."""
    found = {}
    for features, entry in entries("ind_knn_accuracy").items():
        for row in entry["results"]["rows"]:
            key = (row["queries"], row["epsilon"], row["method"], row["accounting"])
            found[(features, *key)] = row
    return found


def guarantee() -> Guarantee:
    """How far the ε of the accuracies holds."""
    return weakest(guarantee_of(entry["results"]) for entry in entries("ind_knn_accuracy").values())


def notes(whole: Guarantee) -> list[str]:
    """What a table's mark means, below it."""
    return [line for note in footnotes([("", whole)]) for line in ("", note)]


def cases() -> list[tuple[str, int, float]]:
    """Features, queries and ε, in the order of the table."""
    order = list(FEATURES)
    return sorted({key[:3] for key in accuracy_rows()}, key=lambda case: (order.index(case[0]), *case[1:]))


def _main_row(case: tuple[str, int, float], method: str) -> dict[str, Any]:
    accounting = "smaller of rdp and pld" if method == "private_knn" else "gdp"
    return accuracy_rows()[(*case, method, accounting)]


def accuracy_table() -> list[str]:
    """Accuracy of the three methods."""
    lines = [
        "| features | queries | ε | " + " | ".join(METHODS.values()) + " |",
        "|---|---|---|" + "---|" * len(METHODS),
    ]
    for case in cases():
        cells = [f"{row['mean']:.3f} ± {row['spread']:.3f}" for row in (_main_row(case, m) for m in METHODS)]
        lines.append(f"| {_shown(case)} | {' | '.join(cells)} |")
    return lines + notes(guarantee())


def _shown(case: tuple[str, int, float]) -> str:
    return f"{FEATURES[case[0]]} | {case[1]:,} | {case[2]:g}{mark(guarantee())}"


def conversion_table() -> list[str]:
    """Accuracy with Gaussian DP, and what it gains on the two conversions from RDP."""
    lines = [
        "| features | queries | ε | thresholds | Gaussian DP | over improved RDP | over classic RDP |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = accuracy_rows()
    for case in cases():
        for method, name in (("density", "density"), ("fixed", "one τ")):
            cells = [f"{rows[(*case, method, 'gdp')]['in_hindsight']['mean']:.4f}"]
            for conversion in CONVERSION_NAMES:
                found = rows[(*case, method, conversion)]["in_hindsight"]
                cells.append(f"{100 * found['gdp_gain']:+.3f} ± {100 * found['gdp_gain_error']:.3f}")
            lines.append(f"| {_shown(case)} | {name} | {' | '.join(cells)} |")
    return lines + notes(guarantee())


def speed_table() -> list[str]:
    """Milliseconds a query beside the bare product."""
    lines = [
        "| records × dimensions | queries at once | product | Ind-KNN | ratio | with hashing | candidates | recall |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results("ind_knn_speed")["rows"]:
        lines.append(
            f"| {row['records']:,} × {row['dimension']} | {row['batch']:,} | {row['product_ms']:.2f} ms "
            f"| {row['exact_ms']:.2f} ms | {row['exact_ratio']:.2f} | {row['hashing_ms']:.2f} ms "
            f"| {row['candidates']:,.0f} | {row['recall']:.2f} |"
        )
    return lines


def updates_table() -> list[str]:
    """Both comparisons with NoisySGD, for each retraining frequency."""
    whole = guarantee_of(results("updates"))
    lines = [
        f"| a change after every | trainings | Ind-KNN: accuracy | s/query | s/change | NoisySGD: accuracy, same "
        f"ε{mark(whole)} | ε if as accurate | s/query |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results("updates")["rows"]:
        ours, theirs = row["ind_knn"], row["noisy_sgd"]
        needed = f"{theirs['as_accurate']['epsilon']:.2f}{mark(whole)}" if "as_accurate" in theirs else "–"
        lines.append(
            f"| {row['period']:,} queries | {row['trainings']} | {ours['mean']:.3f} "
            f"| {ours['seconds_per_query']:.5f} | {ours['seconds_per_change']:.3f} "
            f"| {theirs['at_same_epsilon']['accuracy']:.3f} | {needed} | {theirs['seconds_per_query']:.5f} |"
        )
    return lines + notes(whole)


TABLES = {
    "accuracy": accuracy_table,
    "conversions": conversion_table,
    "speed": speed_table,
    "updates": updates_table,
}


def rendered(text: str) -> str:
    """The page with its tables replaced."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: rendered by benchmarks/ind_knn_report.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n" + "\n".join(table()) + f"\n{end}{after}"
    return text


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_accuracy() -> None:
    """``ind_knn_accuracy.png``: accuracy against ε, one panel for each features and number of queries."""
    pyplot = _pyplot()
    panels = list(dict.fromkeys(case[:2] for case in cases()))
    columns = max(1, len({queries for _, queries in panels}))
    figure, axes = pyplot.subplots(
        math.ceil(len(panels) / columns),
        columns,
        figsize=(8, 6.5),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, panel in zip(axes.flat, panels, strict=True):
        ours = [case for case in cases() if case[:2] == panel]
        for (method, name), marker in zip(METHODS.items(), "os^", strict=True):
            found = [_main_row(case, method) for case in ours]
            axis.errorbar(
                [case[2] for case in ours],
                [row["mean"] for row in found],
                [row["spread"] for row in found],
                marker=marker,
                label=name,
                capsize=3,
            )
        axis.set_title(f"{FEATURES[panel[0]]}, {panel[1]:,} queries", fontsize=10)
        axis.set_xscale("log")
        epsilons = [case[2] for case in ours]
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel(f"ε{mark(guarantee())} at δ = 1e-5 (add/remove)")
    for row in axes:
        row[0].set_ylabel("accuracy of the answers")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=9)
    explain(figure, footnotes([("", guarantee())]))
    figure.savefig(PAGE.parent / "ind_knn_accuracy.png", dpi=100)


def plot_updates() -> None:
    """``ind_knn_updates.png``: seconds and ε against the retraining frequency, and ε as queries are answered."""
    pyplot = _pyplot()
    stored = results("updates")
    rows = stored["rows"]
    periods = [row["period"] for row in rows]
    whole = guarantee_of(stored)
    figure, (time, privacy, course) = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    time.loglog(periods, [row["ind_knn"]["seconds_per_query"] for row in rows], "o-", label="Ind-KNN")
    time.loglog(
        periods, [row["noisy_sgd"]["seconds_per_query"] for row in rows], "^-", label="linear NoisySGD"
    )
    time.set_ylabel("seconds a query, changes included")
    privacy.semilogx(periods, [row["ind_knn"]["epsilon"] for row in rows], "o-", label="Ind-KNN")
    aligned = [row for row in rows if "as_accurate" in row["noisy_sgd"]]
    privacy.loglog(
        [row["period"] for row in aligned],
        [row["noisy_sgd"]["as_accurate"]["epsilon"] for row in aligned],
        "^-",
        label="NoisySGD, as accurate",
    )
    privacy.set_ylabel(f"ε{mark(whole)} for all queries together")
    for axis in (time, privacy):
        axis.set_xlabel("queries between changes")
        axis.invert_xaxis()
    course.axhline(rows[0]["ind_knn"]["epsilon"], color="C0", label="Ind-KNN")
    for row in rows:
        if "median_record" in row["ind_knn"]:
            course.plot(
                *zip(*row["ind_knn"]["median_record"], strict=True), "C0:", label="Ind-KNN, median record"
            )
    for row, style in zip(
        (row for row in rows if "followed" in row["noisy_sgd"]), ("--", "-."), strict=False
    ):
        asked, epsilons = zip(*row["noisy_sgd"]["followed"], strict=True)
        # A training is paid for before the queries that it answers.
        course.step(
            [0, *asked],
            [*epsilons, epsilons[-1]],
            "C1" + style,
            where="post",
            label=f"NoisySGD, Q = {row['period']}",
        )
    course.set_xlabel("queries answered")
    course.set_ylabel(f"ε{mark(whole)} spent, equal accuracy")
    for axis in (time, privacy, course):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    explain(figure, footnotes([("", whole)]))
    figure.savefig(PAGE.parent / "ind_knn_updates.png", dpi=100)


def draw() -> None:
    """Both plots of the page."""
    plot_accuracy()
    plot_updates()


def fresh() -> dict[Path, str]:
    """The page as the stored results say."""
    return {PAGE: rendered(PAGE.read_text(encoding="utf-8"))}
