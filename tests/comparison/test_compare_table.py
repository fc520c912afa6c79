"""Tables, plots and pages of stored comparisons."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks import render
from pl_privknn._checks import at_most
from pl_privknn.cli.main import main
from pl_privknn.comparison import markdown_table, read_comparison
from pl_privknn.comparison.plot import digest_of, draw, figure_of
from pl_privknn.comparison.results import epsilon_of_all, result_from
from pl_privknn.comparison.run import Planner
from pl_privknn.comparison.runner import choose
from pl_privknn.comparison.table import joint_cost
from pl_privknn.privacy.mechanisms.base import SEEDED_NOISE
from tests.comparison.compare_setup import (
    made,
    own_folder,  # noqa: F401 - used by itself
)

ROOT = Path(__file__).resolve().parents[2]


ACCURACIES = {
    "a": {0.5: [0.6, 0.7, 0.65], 2: [0.8, 0.82, 0.81]},
    "b": {0.5: [0.5, 0.6, 0.7], 2: [0.83, 0.83, 0.86]},
}
CONDITIONAL = {0.5: [0.9, 0.92, 0.94], 2: [0.7, 0.72, 0.71]}


def made_results():
    results = [
        made(method, target, accuracy, seed, "conditional" if method == "c" else "unconditional", place)
        for place, (method, cells) in enumerate({**ACCURACIES, "c": CONDITIONAL}.items())
        for target, accuracies in cells.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    return [*results, made("b", math.inf, 0.9, place=1), made("top", math.inf, 0.95, place=3)]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_table_names_the_best_and_keeps_conditions_apart():
    lines = markdown_table(made_results()).splitlines()
    assert lines[0] == "| method | ε ≤ 0.5 | ε ≤ 2 | without privacy |"
    assert lines[2] == "| A | **0.650 ± 0.050** | 0.810 ± 0.010 | – |"
    assert lines[3] == "| B | 0.600 ± 0.100 | **0.840 ± 0.017** | 0.900 (1 of 3 seeds) |"
    assert lines[4] == "| C † | 0.920 ± 0.020 † | 0.710 ± 0.010 † | – |"
    assert lines[5] == "| TOP | – | – | 0.950 (1 of 3 seeds) |"
    assert lines[6] == "| *best* | A (C † is ahead) | B |  |"
    assert "at least 0.98 of it" in lines[8]
    assert lines[10:] == ["† guarantee: conditional – if C."]


def test_student_head_and_mean_of_a_run_are_rows_and_its_cost_counts_once():
    runs = [made("a", 1, 0.7, seed) for seed in range(2)]
    release = {"mechanism": "gaussian", "sigma": 40.0, "l2_sensitivity": 1.0, "count": 1}
    for run, head in zip(runs, (0.8, 0.84), strict=True):
        models = {"student_test_accuracy": 0.7, "head_test_accuracy": head, "mean_test_accuracy": 0.9}
        run.values.update(models, records=[release])
    other = made("b", 1, 0.75)
    table = markdown_table([*runs, other])
    lines = table.splitlines()
    assert lines[2:6] == [
        "| A, student | 0.700 ± 0.000 |",
        "| A, head | 0.820 ± 0.028 |",
        "| A, mean of both | **0.900 ± 0.000** |",
        "| B | 0.750 (1 of 2 seeds) |",
    ]
    assert lines[6] == "| *best* | A, mean of both |"
    names = legend(figure_of([*runs, other]))
    assert {"A, student", "A, head", "A, mean of both", "B"} <= set(names)
    both = epsilon_of_all([record for run in runs for record in run.values["records"]], 1e-5, "add_remove")
    assert f"ε ≤ {at_most(both)} " in joint_cost([*runs, other])


def test_plot_draws_conditions_hollow_lists_names_by_their_ends_and_draws_bounds_behind_them(tmp_path):
    results = made_results()
    (axes,) = figure_of(results).axes
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
    caption = figure_of(results).get_supxlabel()
    assert caption.startswith("Means over seeds 0, 1, 2; bars are standard deviations.")
    assert caption.endswith("\n† guarantee: conditional – if C.")
    levels = {float(line.get_ydata()[0]) for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]}
    assert levels == {0.95}
    # B goes on to what it reaches without privacy, one step behind the last ε.
    (dotted,) = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert tuple(dotted.get_ydata()) == (pytest.approx(0.84), 0.9)
    assert dotted.get_xdata()[1] == pytest.approx(8)
    assert legend(figure_of(results)) == ["TOP", "B", "A", "C †"]
    draw(results, tmp_path / "one")
    draw(results, tmp_path / "two")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert digest_of(results) != digest_of(results[1:])


def test_one_seed_has_no_bars_and_a_crowd_gets_a_panel():
    single = [made(name, target, 0.5 + place / 10) for place, name in enumerate("ab") for target in (1, 2, 4)]
    (axes,) = figure_of(single).axes
    assert all(not container.has_yerr for container in axes.containers)
    assert figure_of(single).get_supxlabel().startswith("One run each, seed 0, which decides training")
    crowd = [
        made(name, target, accuracy + 0.002 * place, place=place)
        for place, name in enumerate("abcdef")
        for target, accuracy in ((1, 0.5), (2, 0.7), (4, 0.9))
    ]
    whole, zoomed = figure_of(crowd).axes
    low, high = zoomed.get_ylim()
    assert low < 0.9 < 0.91 < high
    assert high - low < 0.1 * (whole.get_ylim()[1] - whole.get_ylim()[0])


def test_documentation_shows_stored_comparisons_and_tells_old_ones(tmp_path, monkeypatch):
    stored = {"compare_made": made_results()}
    monkeypatch.setattr(render, "comparisons", lambda: stored)
    monkeypatch.setattr(render, "PLOTS", tmp_path)
    table = render.compared()
    assert "(compare_made.svg)" in table
    assert "| *best* | A (C † is ahead) | B |  |" in table
    assert render.old_plots() == ["compare_made.svg"]
    render.draw(stored["compare_made"], tmp_path / "compare_made")
    assert render.old_plots() == []
    first = stored["compare_made"][0]
    stored["compare_made"][0] = result_from({**first.values, "test_accuracy": 0.1}, "made")
    assert render.old_plots() == ["compare_made.svg"]
    assert render.compared() != table
    with pytest.raises(SystemExit, match="expected one line '<!-- results: rendered"):
        render.with_table("no marks", "results", table, "page.md")


@pytest.mark.long(
    "compare_arrays", "compare_bbc_news", "compare_fashion_mnist", "compare_fashion_mnist_attributes"
)
@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/compare_*.yaml")), ids=lambda path: path.stem)
def test_shipped_comparison_is_understood(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, labels = np.zeros((20, 16, 16), np.uint8), np.arange(20) % 10
    parts = {"private": "labels", "public": "truth", "test": "labels"}
    arrays = {f"{part}_images": images for part in parts}
    np.savez("arrays.npz", **arrays, **{f"{part}_{name}": labels for part, name in parts.items()})
    (tmp_path / "data" / "bbc_news").mkdir(parents=True)
    for part in parts:
        rows = "".join(f"words of {topic},topic {topic}\n" for topic in range(5) for _ in range(4))
        (tmp_path / "data" / "bbc_news" / f"{part}.csv").write_text(f"text,label\n{rows}")
    # Plans of those that ask about all public images need the data, which may not be there.
    comparison = read_comparison(path)
    methods = [
        method for method in comparison.methods if "all" not in method.sections.get("labeling", {}).values()
    ]
    names = [method.name for method in methods]
    assert main(["compare", str(path), "--dry-run", "--seeds", "0", "--epsilons", "1", "--only", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    seeded = f"‡ guarantee: none – {SEEDED_NOISE}"
    if comparison.noise_seeded or "guided_pate" in names:
        assert lines.pop().startswith(seeded if comparison.noise_seeded else "† guarantee: conditional – ")
    assert all(line.startswith("missing") for line in lines)
    planned = [float(line.rsplit("plan ε=", 1)[1].split(",")[0]) for line in lines if "plan ε=" in line]
    # Where noise comes from seeds no plan has a guarantee; else only the guided partition's has a condition.
    for line in lines:
        own = "conditional" if "guided_pate" in line else "unconditional"
        level = "none" if comparison.noise_seeded else own
        assert "plan ε=" not in line or line.endswith(f"guarantee: {level}"), line
    assert len(planned) == sum(method.kind == "labeler" for method in methods)
    assert all(0.9 < epsilon <= 1 for epsilon in planned)
    planner = Planner()
    for run in choose(comparison, seeds=[0], epsilons=[1]):
        planner.check(run)
