"""Draw test accuracy against ε from the stored results, and each stored comparison: plot.py."""

from __future__ import annotations

import statistics

from render import DOCS, HERE, comparisons, runs

PICTURE = HERE.parent / "docs" / "accuracy_vs_epsilon.svg"
TITLES = {
    "compare_fashion_mnist": "Fashion-MNIST, 60,000 private records",
    "compare_digits": "Digits, 1,000 private records",
}
LABELS = {"PrivateKNN": "Private-kNN", "ReverseKNN": "reverse kNN"}


def main() -> None:
    """The runs of the table into one plot, and each comparison into its own."""
    draw_runs()
    for folder in comparisons():
        from pl_privknn.comparison import read_results
        from pl_privknn.comparison.plot import draw

        draw(read_results(folder), DOCS / folder.name, TITLES.get(folder.name))


def draw_runs() -> None:
    """One point a run of the table, with the spread over its seeds; conditional guarantees are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pl_privknn"  # the same file for the same results
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    series: dict[str, list[tuple[float, float, float, bool]]] = {}
    for summaries in runs().values():
        if summaries[0]["epsilon"] is None or summaries[0]["data"] != "FashionMNISTDataModule":
            continue
        accuracies = [summary["test_accuracy"] for summary in summaries]
        sd = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        point = (
            summaries[0]["epsilon"],
            statistics.mean(accuracies),
            sd,
            summaries[0]["guarantee"] == "conditional",
        )
        series.setdefault(summaries[0]["labeler"], []).append(point)
    for labeler, points in sorted(series.items()):
        points.sort()
        hollow = any(point[3] for point in points)
        axes.errorbar(
            [point[0] for point in points],
            [point[1] for point in points],
            yerr=[point[2] for point in points],
            marker="o",
            markerfacecolor="none" if hollow else None,
            capsize=3,
            label=LABELS.get(labeler, labeler) + (" (conditional)" if hollow else ""),
        )
    axes.set_xscale("log")
    axes.set_xlabel("ε at δ = 1e-5 (add_remove)")
    axes.set_ylabel("test accuracy of the student")
    axes.set_title("Fashion-MNIST, 60,000 private records")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    figure.savefig(PICTURE.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
