"""Tables of measured results in pages of docs/methods and docs/guides.

Each table stands between ``<!-- NAME: rendered by benchmarks/render_docs.py -->`` and ``<!-- end of NAME -->`` and is
made from files of ``benchmarks/results/`` alone, so none can differ from what was measured. ``ind_knn.md`` and
``papers.md`` have modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import attack_pages, scale, speed_tables
from benchmarks.record import DOCS, entries, results
from benchmarks.render import comparison, explained, guarantee, markdown, row, runs, spread
from pl_privknn.comparison.marks import guarantee_of, mark
from pl_privknn.privacy.mechanisms.base import weakest


def students() -> str:
    """Students with 1,000 labels."""
    return _accuracies("student", _students("unlabeled"))


def noisy_labels() -> str:
    """Ways to deal with wrong labels."""
    found = _students("noise")
    named = ((name, guarantee_of(one)) for name, one in found.items())
    return explained(_accuracies("labels and loss", found), named)


def _students(part: str) -> dict[str, Any]:
    prefix = f"{part}: "
    found = {
        name.removeprefix(prefix): one for name, one in entries("students").items() if name.startswith(prefix)
    }
    return {name: one["results"] for name, one in found.items()}


def _accuracies(name: str, found: dict[str, Any]) -> str:
    return markdown(
        [name, "test accuracy", "seeds"],
        [
            [who, f"{one['accuracy']:.3f} ± {one['deviation']:.3f}", len(one["accuracies"])]
            for who, one in found.items()
        ],
    )


def _runs(chosen: list[str], keep: list[int]) -> str:
    names = ("run", "data", "teacher", "ε", "δ", "answered", "label accuracy", "test accuracy", "seeds")
    found = runs()
    lines = [[cell.strip() for cell in row(name, found[name]).strip("|").split("|")] for name in chosen]
    table = markdown([names[i] for i in keep], [[line[i] for i in keep] for line in lines])
    return explained(table, ((name, guarantee(found[name])) for name in chosen))


def curator() -> str:
    """Runs of reverse kNN with a curator."""
    chosen = [name for name in runs() if name.startswith("fashion_mnist_reverse_knn_eps")]
    return _runs(chosen, [0, 3, 6, 7, 8])


def same_queries() -> str:
    """Three teachers on 1,000 random queries, with the same student."""
    chosen = [
        "fashion_mnist_pate",
        "fashion_mnist_private_knn_one_round_uda",
        "fashion_mnist_reverse_knn_random_queries",
    ]
    return _runs(chosen, [2, 3, 5, 6, 7, 8])


def smoothing() -> str:
    """What asking about means and smoothing counts do to labels."""
    found = results("reverse_knn", "labels")
    table = markdown(
        ["ε", "queries", "asked about", "counts", "label accuracy"],
        [
            [
                f"{one['epsilon']:g}{mark(guarantee_of(one))}",
                one["queries"],
                one["ask"],
                "of the nearest query" if one["spread"] == "nearest" else "smoothed",
                f"{one['label_accuracy']:.3f} ± {one['label_accuracy_deviation']:.3f}",
            ]
            for one in found
        ],
    )
    return explained(table, (("", guarantee_of(one)) for one in found))


def local() -> str:
    """Label accuracy without a curator."""
    shown = ("0.1", "0.2", "0.4", "0.6", "1.0")
    lines, found = [], results("reverse_knn_local")
    whole = guarantee_of(found)
    for clusters, curves in found["curves"].items():
        for name, points in curves.items():
            cells = [points] * len(shown) if isinstance(points, float) else [points[e]["mean"] for e in shown]
            lines.append([clusters, name.replace("_", " "), *(f"{cell:.3f}" for cell in cells)])
    table = markdown(["clusters", "protocol", *(f"ε {e}{mark(whole)}" for e in shown)], lines)
    return explained(table, [("", whole)])


def reverse_speed() -> str:
    """One round of reverse kNN beside the bare product."""
    entry = entries("reverse_knn")["speed"]
    one, data = entry["results"], entry["settings"]
    return (
        f"Labelling {data['records']:,} records of {data['dimensions']:,} dimensions "
        f"against {one['queries']} queries takes {one['ratio']:.2f} times the bare matrix product (median of "
        f"{one['repeat']} pairs; {one['ratio_min']:.2f} to {one['ratio_max']:.2f}; {one['threads']} threads)."
    )


def opacus() -> str:
    """NoisySGD beside Opacus' loop."""
    lines, named = [], []
    for one in results("noisy_sgd")["rows"]:
        for who, name in (("opacus", "Opacus' loop"), ("ours", "`NoisySGD`")):
            run = one[who]
            marked = mark(guarantee_of(run))
            named.append((name, guarantee_of(run)))
            tight = run.get("epsilon_pld", run.get("epsilon_prv"))
            lines.append(
                [
                    one["clipping"],
                    name,
                    f"{run['epsilon_rdp']:.4f}{marked}",
                    f"{tight:.4f}{marked}",
                    f"{run['accuracy']:.3f} ± {run['accuracy_deviation']:.3f}",
                    f"{run['examples_per_second']:,.0f}",
                    "1" if who == "opacus" else f"{one['speed_ratio']:.2f}",
                ]
            )
    names = ["clipping", "loop", "ε (RDP)", "ε (PRV / PLD)", "test accuracy", "examples a second", "ratio"]
    return explained(markdown(names, lines), named)


def pate_speed() -> str:
    """Stacked teachers beside teachers trained one after another."""
    return markdown(
        ["teachers", "at once", "one after another", "ratio", "of processor seconds"],
        [
            [
                name,
                f"{one['at_once_s']:.2f} s",
                f"{one['one_after_another_s']:.2f} s",
                f"{one['ratio']:.1f}",
                f"{one['processor_ratio']:.1f}",
            ]
            for name, one in results("pate_speed")["cases"].items()
        ],
    )


def statistics_teacher() -> str:
    """Head, student and their mean; each with the number of its runs."""
    rows: dict[tuple[bool, int, str, float], list[dict[str, Any]]] = {}
    for entry in entries("statistics").values():
        settings, results = entry["settings"], entry["results"]
        student = settings.get("student", "on pixels")
        where = not settings.get("imagenet_weights"), settings["split_seed"], student, results["epsilon"]
        rows.setdefault(where, []).append(results)
    lines, named = [], []
    for (own, split, student, epsilon), found in sorted(rows.items()):
        weak = weakest(guarantee_of(one) for one in found)
        named.append((f"ε = {epsilon:g}", weak))
        cells = []
        for name in ("label_accuracy", "head", "student", "mean"):
            known = [one[name] for one in found if name in one]
            cells.append(f"{spread(known)} ({len(known)})" if known else "–")
        features = "the public images" if own else "these and ImageNet"
        lines.append([features, split, student, f"{epsilon:g}{mark(weak)}", *cells])
    header = [
        "features know",
        "split",
        "student",
        "ε",
        "label accuracy (runs)",
        "head (runs)",
        "its accuracy (runs)",
        "mean with head (runs)",
    ]
    return explained(markdown(header, lines), named)


def private_training() -> str:
    """Settings of PrivateTraining; each with the number of its runs."""
    rows: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for part, entry in entries("private_training").items():
        if not part.startswith("speed"):
            asked = float(part.rpartition(", seed")[0].rpartition("ε ")[2])
            rows.setdefault((entry["settings"]["setting"], asked), []).append(entry["results"])
    lines, named = [], []
    for (name, asked), found in sorted(rows.items()):
        weak = weakest(guarantee_of(one) for one in found)
        named.append((f"{name}, ε = {asked:g}", weak))
        lines.append(
            [
                name,
                f"{asked:g}{mark(weak)}",
                found[0]["steps"],
                f"{found[0]['noise_multiplier']:.3g}",
                spread([one["public_accuracy"] for one in found]),
                spread([one["test_accuracy"] for one in found]),
                len(found),
            ]
        )
    header = ["setting", "ε", "steps", "σ", "accuracy on public images", "test accuracy", "seeds"]
    return explained(markdown(header, lines), named)


def student_parts() -> str:
    """The student with one thing changed, and its mean with the head."""
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for part, entry in entries("student_parts").items():
        found.setdefault(part.rpartition(", ε ")[0], {})[entry["results"]["epsilon"]] = entry["results"]
    guarantees = {ε: guarantee_of(one) for runs in found.values() for ε, one in runs.items()}
    header = [
        f"{who}, ε = {ε:g}{mark(guarantee)}"
        for who in ("student", "mean with head")
        for ε, guarantee in sorted(guarantees.items())
    ]
    lines = [
        [name, *(spread(runs[ε][kind]) for kind in ("student", "mean") for ε in sorted(runs))]
        for name, runs in found.items()
    ]
    named = [(f"ε = {ε:g}", guarantee) for ε, guarantee in guarantees.items()]
    return explained(markdown(["", *header], lines), named)


def compared(name: str) -> str:
    """Runs of a comparison that stands in the docs alone."""
    from pl_privknn.comparison import markdown_table

    return markdown_table(comparison(name))


#: Page, name of the table, what makes it.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("guides/attack.md", "attacks", attack_pages.attacks),
    ("guides/attack.md", "attack faults", attack_pages.faults),
    ("guides/attack.md", "membership", attack_pages.membership),
    ("guides/comparison.md", "second split", partial(compared, "second_split")),
    ("guides/private_training.md", "private training", private_training),
    ("methods/statistics.md", "extractors", speed_tables.extractors),
    ("methods/statistics.md", "statistics", statistics_teacher),
    ("scale.md", "scale", scale.table),
    ("scale.md", "table memory", speed_tables.memory),
    ("scale.md", "speed", speed_tables.speed),
    ("methods/students.md", "students", students),
    ("methods/students.md", "student parts", student_parts),
    ("methods/students.md", "noisy labels", noisy_labels),
    ("methods/labeling.md", "second rounds", partial(compared, "second_rounds")),
    ("methods/reverse_knn.md", "curator", curator),
    ("methods/reverse_knn.md", "smoothing", smoothing),
    ("methods/reverse_knn.md", "speed", reverse_speed),
    ("methods/reverse_knn.md", "local", local),
    ("methods/noisy_sgd.md", "opacus", opacus),
    ("methods/pate.md", "stacked", pate_speed),
    ("methods/pate.md", "same queries", same_queries),
]


def rendered(page: str, text: str) -> str:
    """The text of a page with its tables fresh."""
    for name, make in [(name, make) for where, name, make in TABLES if where == page]:
        start, end = f"<!-- {name}: rendered by benchmarks/render_docs.py -->", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise SystemExit(f"{page}: want one line {start!r} and one line {end!r} after it")
        before, rest = text.split(start)
        _, after = rest.split(end)
        text = f"{before}{start}\n{make()}\n{end}{after}"
    return text


def fresh() -> dict[Path, str]:
    """The pages as the stored results say."""
    pages = dict.fromkeys(where for where, _, _ in TABLES)
    return {DOCS / page: rendered(page, (DOCS / page).read_text(encoding="utf-8")) for page in pages}
