"""Tables, plots and pages of stored comparisons."""

import math
import statistics

import numpy as np
import pytest

from benchmarks import render
from pl_privknn.comparison import markdown_table
from pl_privknn.comparison.plot import draw, figure_of, results_digest
from pl_privknn.comparison.plot import render as render_files
from tests.comparison.compare_setup import made

ACCURACIES = {
    "a": {0.5: [0.6, 0.7, 0.65], 2: [0.8, 0.82, 0.81]},
    "b": {0.5: [0.5, 0.6, 0.7], 2: [0.83, 0.83, 0.86]},
}
CONDITIONAL = {0.5: [0.9, 0.92, 0.94], 2: [0.7, 0.72, 0.71]}


def made_results():
    results = [
        made(method, target, accuracy, seed, "conditional" if method == "c" else "unconditional")
        for method, cells in {**ACCURACIES, "c": CONDITIONAL}.items()
        for target, accuracies in cells.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    return [*results, made("b", math.inf, 0.9), made("top", math.inf, 0.95)]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_table_names_the_best_and_keeps_conditions_apart():
    lines = markdown_table(made_results()).splitlines()
    assert lines[0] == "| method | ε ≤ 0.5 | ε ≤ 2 | without privacy |"
    assert lines[2] == "| A | **0.650 ± 0.050** | 0.810 ± 0.010 | – |"
    assert lines[3] == "| B | 0.600 ± 0.100 | **0.840 ± 0.017** | 0.900 (1 of 3 seeds) |"
    assert lines[4] == "| C † | 0.920 ± 0.020 † | 0.710 ± 0.010 † | – |"
    assert lines[5] == "| TOP | – | – | 0.950 (1 of 3 seeds) |"
    assert "at δ = 1e-05 (add_remove, a record), 3 seeds" in lines[7]
    assert "at least 0.98 of it" in lines[7]
    assert lines[9:] == ["† guarantee: conditional – if C."]


def test_student_head_and_mean_of_a_run_are_rows():
    models = {"student_test_accuracy": 0.7, "ensemble_test_accuracy": 0.9}
    heads = enumerate((0.8, 0.84))
    runs = [made("a", 1, 0.7, seed, **models, head_test_accuracy=head) for seed, head in heads]
    results = [*runs, made("b", 1, 0.75)]
    assert markdown_table(results).splitlines()[2:6] == [
        "| A, student | 0.700 ± 0.000 |",
        "| A, head | 0.820 ± 0.028 |",
        "| A, ensemble | **0.900 ± 0.000** |",
        "| B | 0.750 (1 of 2 seeds) |",
    ]
    names = legend(figure_of(results, "models"))
    assert {"A, student", "A, head", "A, ensemble", "B"} <= set(names)


def test_plot_draws_conditions_hollow_and_bounds_behind_the_last_epsilon(tmp_path):
    results = made_results()
    figure = figure_of(results, "made")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    series = {container.get_label(): container for container in axes.containers}
    assert set(series) == {"A", "B", "C †"}
    for name, (line, _, (bars,)) in series.items():
        hollow = "†" in name
        cells = CONDITIONAL if hollow else ACCURACIES[name.lower()]
        assert line.get_xdata() == pytest.approx([0.49, 1.96])
        assert line.get_ydata() == pytest.approx([statistics.mean(each) for each in cells.values()])
        halves = [np.diff(segment[:, 1])[0] / 2 for segment in bars.get_segments()]
        assert halves == pytest.approx([statistics.stdev(each) for each in cells.values()])
        assert (line.get_markerfacecolor() == "none") == hollow
        assert line.get_linestyle() == ("--" if hollow else "-")
    caption = figure.get_supxlabel()
    assert caption.startswith("Means over seeds 0, 1, 2; bars are standard deviations.")
    assert caption.endswith("\n† guarantee: conditional – if C.")
    levels = {float(line.get_ydata()[0]) for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]}
    assert levels == {0.95}
    # B goes on to what it reaches without privacy, one step behind the last ε.
    (dotted,) = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert tuple(dotted.get_ydata()) == (pytest.approx(0.84), 0.9)
    assert dotted.get_xdata()[1] == pytest.approx(8)
    assert set(legend(figure)) == {"TOP, without privacy", "B", "A", "C †"}
    draw(results, tmp_path / "one", "made")
    draw(results, tmp_path / "two", "made")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert results_digest(results) in (tmp_path / "one.svg").read_text()
    assert results_digest(results) != results_digest(results[1:])


def test_one_seed_has_bars_over_test_examples_and_each_of_many_methods_its_own_colour():
    many = [made(f"m{place}", target, 1 - place / 40) for place in range(14) for target in (1, 2)]
    figure = figure_of(many, "many")
    (axes,) = figure.axes
    assert all(not container.has_yerr for container in axes.containers)
    assert figure.get_supxlabel() == "One run each, seed 0."
    lines = [container.lines[0] for container in axes.containers]
    assert len({line.get_color() for line in lines}) == 14
    counted = [made("a", target, 0.9, test_examples=400) for target in (1, 2)]
    figure = figure_of(counted, "counted")
    (container,) = figure.axes[0].containers
    halves = [np.diff(segment[:, 1])[0] / 2 for segment in container.lines[2][0].get_segments()]
    assert halves == pytest.approx([1.96 * math.sqrt(0.9 * 0.1 / 400)] * 2, rel=0.03)
    assert figure.get_supxlabel().endswith("bars are 95 % intervals over test examples.")
    alone = figure_of(counted[:1], "one ε").axes[0]
    assert alone.get_xlim() == (0.5, 2)
    cheap = figure_of([made("a", 1, 0.9, epsilon=0.2)], "one ε").axes[0]
    assert cheap.get_xlim()[0] < 0.2
    assert "| A | **0.900 ± 0.030** | **0.900 ± 0.030** |" in markdown_table(counted)


def test_results_of_some_runs_are_marked_as_partial(tmp_path):
    results = made_results()
    table = render_files(results, tmp_path, "made", len(results) + 3)
    assert table.startswith(f"partial: {len(results)} of {len(results) + 3} runs\n\n| method |")
    assert f"made (partial: {len(results)} of" in (tmp_path / "comparison.svg").read_text()
    assert render_files(results, tmp_path, "made", len(results)).startswith("| method |")
    assert "partial" not in (tmp_path / "comparison.svg").read_text()


def test_documentation_shows_stored_comparisons_and_tells_old_ones(tmp_path, monkeypatch):
    stored = {"compare_fashion_mnist": made_results()}
    monkeypatch.setattr(render, "comparisons", lambda: stored)
    monkeypatch.setattr(render, "PLOTS", tmp_path)
    monkeypatch.setattr(render, "_SHOWN", (0.5,))
    table = render.compared()
    assert "(../guides/compare_fashion_mnist.svg)" in table
    assert "| C † | 0.920 ± 0.020 † |" in table
    assert render.old_plots() == ["compare_fashion_mnist.svg"]
    render.draw(stored["compare_fashion_mnist"], tmp_path / "compare_fashion_mnist", "made")
    assert render.old_plots() == []
    stored["compare_fashion_mnist"][0] = made("a", 0.5, 0.1)
    assert render.old_plots() == ["compare_fashion_mnist.svg"]
    assert render.compared() != table
    with pytest.raises(SystemExit, match="expected one line '<!-- results: rendered"):
        render.with_table("no marks", "results", table, "page.md")


def test_the_largest_class_is_the_last_row_and_balanced_accuracies_are_a_table():
    figures = {"test_baseline": 0.665, "test_balanced_accuracy": 0.55}
    heads = {"student_test_accuracy": 0.7, "head_test_accuracy": 0.8, "ensemble_test_accuracy": 0.9}
    results = [
        made("a", 1, 0.9, **figures, **heads),
        made("b", 1, 0.75, **{**figures, "test_balanced_accuracy": 0.6}),
    ]
    lines = markdown_table(results).splitlines()
    assert lines[5:7] == ["| B | 0.750 |", "| largest class | 0.665 |"]
    assert lines[-4:] == [
        "| balanced accuracy of released models | ε ≤ 1 |",
        "|---|---|",
        "| A | 0.550 |",
        "| B | **0.600** |",
    ]
