"""Write the tables and plots of stored results into docs/.

Each table stands between ``<!-- NAME: rendered by benchmarks/render.py -->`` and ``<!-- end of NAME -->`` and is made
from files of ``benchmarks/results/`` alone, those of the papers by the accountant, so that none can differ from what
was measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import (
    accountants,
    attacks,
    foreign_modules,
    leaderboard,
    membership,
    papers,
    persons,
    recipes,
    text,
)
from benchmarks.record import (
    DOCS,
    ROOT,
    entries,
    epsilon_of,
    explained,
    guarantee,
    listed,
    markdown,
    names,
    results,
    rows_of,
    runs,
    spread,
)
from pl_privknn.comparison import markdown_table
from pl_privknn.comparison.plot import digest_of, draw
from pl_privknn.comparison.results import Result, guarantee_of, in_order, mark, result_from
from pl_privknn.privacy.mechanisms.base import weakest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = DOCS / "guides"
TITLES = {
    "compare_bbc_news": "BBC news, 1,400 private articles",
    "compare_fashion_mnist": "Fashion-MNIST, 60,000 private records",
    "compare_fashion_mnist_attributes": "Attributes of Fashion-MNIST, 60,000 private records",
}
RUN = ("run", "data", "teacher", "ε", "δ", "answered", "label accuracy", "student's test accuracy", "seeds")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`render`."""
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where a page or plot is old")


def render(options: argparse.Namespace) -> int:
    """Render all pages and plots, or name those that differ from what is stored."""
    old = update(fresh(), write=not options.check)
    if options.check:
        old += [f"docs/guides/{plot}" for plot in old_plots()]
        for page in old:
            print(f"{page} is not up to date; run python -m benchmarks render")
        return int(bool(old))
    draw_comparisons()
    for place, figure in (
        (PLOTS / "attack.svg", attacks.figure()),
        (PLOTS / "membership.svg", membership.figure()),
        (PLOTS / "recipes.svg", recipes.figure()),
        (DOCS / "reference" / "accountants.svg", accountants.figure()),
    ):
        _save(figure, place)
    return 0


def fresh(pages: Iterable[str] | None = None) -> dict[Path, str]:
    """Pages, by default all, as the stored results say."""
    found = {}
    for page in dict.fromkeys(where for where, _, _ in TABLES) if pages is None else pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, make in [(name, make) for where, name, make in TABLES if where == page]:
            text = with_table(text, name, make(), page)
        found[ROOT / page] = text
    return found


def with_table(text: str, name: str, table: str, page: str) -> str:
    """A page's text with one table replaced."""
    start, end = f"<!-- {name}: rendered by benchmarks/render.py -->", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"{page}: want one line {start!r} and one line {end!r} after it")
    before, rest = text.split(start)
    return f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"


def update(pages: dict[Path, str], write: bool) -> list[str]:
    """Pages that differ from what they should say, brought up to date if so wanted."""
    old = [page for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    for page in old if write else []:
        page.write_text(pages[page], encoding="utf-8")
    return [str(page.relative_to(ROOT)) for page in old]


def _save(figure: Figure, place: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": place.name}):  # the same file each time
        figure.savefig(place, dpi=110, metadata={"Date": None} if place.suffix == ".svg" else None)


# -- comparisons -------------------------------------------------------------------------------------------------


def comparison(name: str) -> list[Result]:
    """The runs of a stored comparison."""
    found = []
    for part, entry in entries(name).items():
        values = {**entry["results"], **entry["settings"], "versions": entry["versions"]}
        found.append(result_from({**values, "seed": entry["seeds"][0]}, f"{name}, {part}"))
    return in_order(found)


def comparisons() -> dict[str, list[Result]]:
    """The comparisons that docs/guides/comparison.md shows, by name."""
    return {name: comparison(name) for name in names() if name.startswith("compare_")}


#: ε of the tables; the plots show all.
_SHOWN = (0.1, 0.5, 1.0, 2.0, math.inf)


def compared() -> str:
    """Plots and tables of all comparisons."""
    parts = []
    for name, found in comparisons().items():
        picture = f"![test accuracy against ε: {name}]({name}.svg)"
        parts += [picture, markdown_table([result for result in found if result.target in _SHOWN])]
    return "\n\n".join(parts)


def old_plots() -> list[str]:
    """Plots of comparisons that don't show the stored results."""
    plots = {PLOTS / f"{name}.svg": digest_of(found) for name, found in comparisons().items()}
    return [
        plot.name
        for plot, digest in plots.items()
        if not plot.is_file() or digest not in plot.read_text(encoding="utf-8")
    ]


def draw_comparisons() -> None:
    """Each comparison into ``docs/guides/<its name>.svg`` and ``.png``."""
    for name, found in comparisons().items():
        draw(found, PLOTS / name, TITLES.get(name))


# -- runs of one configuration -----------------------------------------------------------------------------------


def run_row(name: str, summaries: list[dict[str, Any]]) -> list[object]:
    """The cells of a run, under :data:`RUN`."""
    first, answered = summaries[0], "–"
    if first.get("queried"):
        answered = f"{statistics.mean(s['answered'] for s in summaries):.0f} of {first['queried']}"
    return [
        name,
        first["data"].removesuffix("DataModule"),
        first.get("labeler", first["student"]),
        epsilon_of(summaries),
        f"{first['delta']:g}" if first.get("delta") else "–",
        answered,
        spread(summary.get("label_accuracy") for summary in summaries),
        spread(summary["test_accuracy"] for summary in summaries),
        len(summaries),
    ]


def run_table(chosen: Iterable[str] | None = None, keep: Iterable[int] = range(len(RUN))) -> str:
    """Some columns of some runs; all of them by default."""
    found, kept = runs(), list(keep)
    shown = list(found if chosen is None else chosen)
    lines = [[run_row(name, found[name])[i] for i in kept] for name in shown]
    return explained(
        markdown([RUN[i] for i in kept], lines), ((name, guarantee(found[name])) for name in shown)
    )


def curator() -> str:
    """Runs of reverse kNN with a curator."""
    chosen = [name for name in runs() if name.startswith("fashion_mnist_reverse_knn_eps")]
    return run_table(chosen, [0, 3, 6, 7, 8])


_SAME_QUERIES = (
    "fashion_mnist_pate",
    "fashion_mnist_private_knn_one_round_uda",
    "fashion_mnist_reverse_knn_random_queries",
)


# -- teachers ----------------------------------------------------------------------------------------------------


def smoothing() -> str:
    """Labels of reverse kNN with means as queries and smoothed counts."""
    found = results("reverse_knn", "labels")
    columns = list(dict.fromkeys((one["epsilon"], one["queries"]) for one in found))
    rows: dict[tuple[str, str], list[str]] = {}
    for one in found:
        cell = f"{one['label_accuracy']:.3f} ± {one['label_accuracy_deviation']:.3f}"
        rows.setdefault((one["ask"], one["spread"]), []).append(cell)
    whole = weakest(guarantee_of(one) for one in found)
    header = [f"ε = {epsilon:g}{mark(whole)}, {queries} queries" for epsilon, queries in columns]
    spreads = {"nearest": "of the nearest query"}
    lines = [[ask, spreads.get(how, "smoothed"), *cells] for (ask, how), cells in rows.items()]
    return explained(markdown(["asked about", "counts", *header], lines), [("", whole)])


def attribute_rules() -> str:
    """Accuracies of rules for attributes, of 1,000 answers at two levels of noise; the best of each line is bold."""
    found = results("multilabel_rules")
    shown = ["half of k", "half of k·min(τ/2.8, 1), denoised", "learned (default)", "learned, 2.8 expected"]
    whole, lines = guarantee_of(found), []
    for row in found["rows"]:
        if row["answers"] == 1000 and row["noise_multiplier"] in (17.7, 50):
            cells = [f"{row['accuracy'][rule]:.3f}" for rule in shown]
            best = max(cells)
            head = [f"{row['tau']:g}", f"{row['noise_multiplier']:g}", f"{row['epsilon']:.2f}{mark(whole)}"]
            lines.append([*head, *(f"**{cell}**" if cell == best else cell for cell in cells)])
    header = ["τ", "σ / sensitivity", "ε of 1,000 answers", *shown]
    return explained(markdown(header, lines), [("", whole)])


def attribute_reverse() -> str:
    """Accuracies of reverse kNN on attributes by r and ε."""
    found = results("multilabel_rules")
    rows: dict[float | None, dict[float, float]] = {}
    for row in found["reverse"]:
        rows.setdefault(row["tau"], {})[row["epsilon"]] = row["accuracy"]
    header = ["r", *(f"ε = {epsilon:g}{mark(guarantee_of(found))}" for epsilon in next(iter(rows.values())))]
    lines = [
        ["no clipping" if tau is None else f"{tau:g}", *(f"{value:.3f}" for value in row.values())]
        for tau, row in rows.items()
    ]
    return explained(markdown(header, lines), [("", guarantee_of(found))])


def extractors() -> str:
    """Accuracy and speed of features."""
    columns = {
        "features": "{part}",
        "numbers": "{width}",
        "linear model": "{linear:.3f}",
        "ten neighbours": "{neighbors:.3f}",
        "images a second": "{images_per_second:,}",
    }
    return listed(columns, rows_of("extractors"))


def statistics_teacher() -> str:
    """Head, student and their mean; each with the number of its runs."""
    rows: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for entry in entries("statistics").values():
        settings, found = entry["settings"], entry["results"]
        student = settings.get("student", "on pixels")
        own = not settings.get("imagenet_weights")
        if own and settings["split_seed"] == 0:  # those with ImageNet are in the comparison
            rows.setdefault((student, found["epsilon"]), []).append(found)
    lines, named = [], []
    for (student, epsilon), seeds in sorted(rows.items()):
        weak = weakest(guarantee_of(one) for one in seeds)
        named.append((f"ε = {epsilon:g}", weak))
        cells = []
        for name in ("label_accuracy", "head", "student", "mean"):
            known = [one[name] for one in seeds if name in one]
            cells.append(f"{spread(known)} ({len(known)})" if known else "–")
        lines.append([student, f"{epsilon:g}{mark(weak)}", *cells])
    kinds = ["label accuracy (runs)", "head (runs)", "its accuracy (runs)", "mean with head (runs)"]
    return explained(markdown(["student", "ε", *kinds], lines), named)


# -- Ind-KNN -----------------------------------------------------------------------------------------------------


def ind_knn_speed() -> str:
    """Time of queries over that of the bare product."""
    columns = {
        "records × dimensions": "{records:,} × {dimension}",
        "queries at once": "{batch:,}",
        "Ind-KNN": "{exact_ratio:.2f}",
        "with hashing": "{hashing_ratio:.2f}",
        "recall": "{recall:.2f}",
    }
    return listed(columns, results("ind_knn_speed")["rows"])


# -- students and training ---------------------------------------------------------------------------------------


def students(kind: str, header: str) -> str:
    """Students with 1,000 labels, or ways to deal with wrong labels."""
    rows = [row for row in rows_of("students") if row["part"].startswith(f"{kind}: ")]
    for row in rows:
        row |= {"part": row["part"].removeprefix(f"{kind}: "), "seeds": len(row["accuracies"])}
    columns = {header: "{part}", "test accuracy": "{accuracy:.3f} ± {deviation:.3f}", "seeds": "{seeds}"}
    table = listed(columns, rows)
    if kind == "unlabeled":  # true labels of public images
        return table
    return explained(table, ((row["part"], guarantee_of(row)) for row in rows))


# -- scale and speed ---------------------------------------------------------------------------------------------


def scaled() -> str:
    """Table of a round at 10⁹ records in many processes; an extrapolation."""
    from benchmarks.scale import PROCESSES, RECORDS, TEACHERS, K

    stored = entries("scale")
    settings = next(iter(stored.values()))["settings"]
    d, share = settings["dimensions"], RECORDS // PROCESSES
    lines = []
    for name, teacher in TEACHERS.items():
        found = stored[name]["results"]
        seconds = found["seconds_a_round"] + share * found["seconds_a_record"]
        sent = found["bytes_sent_a_round"]
        lines.append(
            [
                f"`{name}`",
                teacher.settings,
                f"{4 * share * teacher.table(d) / 1e9:.1f}",
                f"{sent / 1e6:.3g} MB" if sent >= 1e6 else f"{sent / 1e3:.3g} kB",
                f"{seconds / 3600:.2g}",
            ]
        )
    header = ["teacher", "settings", "table, GB", "sent a round", "processor hours of a process"]
    table = markdown(header, lines)
    merging = PROCESSES * stored["merging"]["results"]["seconds_a_query_and_shard"]
    return (
        f"{table}\n\nBeside that global rank 0 merges the candidates of `PrivateKNN`: "
        f"{16 * K * PROCESSES / 1e6:.1f} MB and {merging:.2g} processor seconds a query and release."
    )


def memory() -> str:
    """Table of the memory of a labelling round, beside the table of features."""
    columns = {
        "teacher": "`{part}`",
        "private features": "{records:,} x {dimensions:,}",
        "their table": "{table_mb:,} MB",
        "queries": "{queries}",
        "peak of its own": "{peak_mb_of_its_own:,} MB",
    }
    return listed(columns, rows_of("table_memory"))


def speeds() -> str:
    """Table of stored measurements beside their baselines."""
    from benchmarks.speed import ROWS

    found = {name: one["results"] for name, one in entries("speed").items()}
    lines = [
        [wanted.what, wanted.beside, wanted.aim, ratio(found[name])]
        for name, wanted in ROWS.items()
        if name in found
    ]
    return markdown(["what", "beside", "aim", "ratio of processor seconds"], lines)


def ratio(found: dict[str, Any]) -> str:
    """A ratio with its range, and the seconds of a command."""
    between = f" ({found['ratio_min']:.2f} to {found['ratio_max']:.2f})" if "ratio_min" in found else ""
    clock = f"; {found['ratio_on_the_clock']:.2f} on the clock" if "ratio_on_the_clock" in found else ""
    seconds = f"; {found['seconds']:.2f} s" if "seconds" in found else ""
    return f"{found['ratio']:.2f}{between}{clock}{seconds}"


#: Page, name of the table, what makes it.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/guides/comparison.md", "comparisons", compared),
    ("docs/guides/attack.md", "attacks", attacks.table),
    ("docs/guides/attack.md", "attack faults", attacks.faults_table),
    ("docs/guides/attack.md", "membership", membership.table),
    ("docs/guides/leaderboard.md", "leaderboard", leaderboard.table),
    ("docs/guides/own_data.md", "recipes", recipes.table),
    ("docs/guides/private_training.md", "foreign modules", foreign_modules.table),
    ("docs/guides/private_training.md", "training speed", foreign_modules.speed_table),
    ("docs/guides/text.md", "text", text.table),
    ("docs/methods/ind_knn.md", "speed", ind_knn_speed),
    ("docs/methods/labeling.md", "second rounds", lambda: markdown_table(comparison("second_rounds"))),
    ("docs/methods/multilabel.md", "rules", attribute_rules),
    ("docs/methods/multilabel.md", "reverse", attribute_reverse),
    ("docs/methods/pate.md", "same queries", partial(run_table, _SAME_QUERIES, [2, 3, 5, 6, 7, 8])),
    ("docs/methods/reverse_knn.md", "curator", curator),
    ("docs/methods/reverse_knn.md", "smoothing", smoothing),
    ("docs/methods/statistics.md", "extractors", extractors),
    ("docs/methods/statistics.md", "statistics", statistics_teacher),
    ("docs/methods/students.md", "students", partial(students, "unlabeled", "student")),
    ("docs/methods/students.md", "noisy labels", partial(students, "noise", "labels and loss")),
    ("docs/reference/golden_values.md", "accountants", accountants.table),
    ("docs/methods/unit_of_privacy.md", "persons", persons.table),
    ("docs/scale.md", "scale", scaled),
    ("docs/scale.md", "table memory", memory),
    ("docs/scale.md", "speed", speeds),
    *(("docs/reference/papers.md", name, partial(papers.table, name)) for name in papers.TABLES),
]
