"""Tables, plots and files of comparisons show no guarantee stronger than that of their weakest run."""

import csv
import itertools
import json
import math
import re

import numpy as np
import pytest

from benchmarks.record import entries, names
from pl_privknn.cli.main import main
from pl_privknn.comparison import markdown_table, read_results
from pl_privknn.comparison.plot import digest_of, figure_of, styles
from pl_privknn.comparison.results import NOT_RECORDED, footnotes, guarantee_of
from pl_privknn.comparison.table import best_at, cells_of
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.mechanisms.base import SEEDED_NOISE, Guarantee
from tests.comparison.compare_setup import made

RANKS = {"unconditional": 0, "conditional": 1, "none": 2}
MARKS = {0: "", 1: "†", 2: "‡"}
REASONS = {"unconditional": "", "conditional": "if so; and so", "none": SEEDED_NOISE}


def marked(level, **fields):
    return {**made("a", 1, 0.5).values, "guarantee": level, "reason": REASONS[level], **fields}


def store(folder, *files):
    folder.mkdir(parents=True, exist_ok=True)
    for place, values in enumerate(files):
        (folder / f"{place}.json").write_text(json.dumps(values))
    return folder


def test_a_cell_is_marked_by_its_weakest_run_wherever_it_is_shown(tmp_path, capsys):
    generator, levels, methods, targets = np.random.default_rng(0), list(RANKS), "abcd", (1, 2)
    for number in range(2):
        drawn = {
            key: levels[generator.choice(3, p=(0.6, 0.2, 0.2))]
            for key in itertools.product(methods, targets, range(2))
        }
        files = [
            {**made(method, target, 0.5, seed).values, "guarantee": level, "reason": REASONS[level]}
            for (method, target, seed), level in drawn.items()
        ]
        results = read_results(store(tmp_path / str(number), *files))
        worst = {
            (method, target): max(RANKS[drawn[method, target, seed]] for seed in range(2))
            for method, target in itertools.product(methods, targets)
        }
        table = markdown_table(results)
        for method, line in zip(methods, table.splitlines()[2:6], strict=True):
            wanted = [worst[method, target] for target in targets]
            marks = [re.sub(r"[^†‡]", "", cell) for cell in line.split("|")[1:-1]]
            assert marks == [MARKS[rank] for rank in (max(wanted), *wanted)]
        for level, rank in RANKS.items():
            assert (f"{MARKS[rank]} guarantee: {level}" in table) == (rank > 0 and rank in worst.values())
        (axes,) = figure_of(results).axes
        for container in axes.containers:
            label, epsilons = container.get_label(), container[0].get_xdata()
            shown = [worst[label[0].lower(), math.ceil(epsilon)] for epsilon in epsilons]
            assert label[1:].strip() == MARKS[max(shown)]
            assert (container[0].get_linestyle() == "--") == (max(shown) > 0)
    assert main(["compare", "--render", str(tmp_path / "0"), "--output", str(tmp_path / "shown")]) == 0
    assert "at δ = 1e-05, guarantee: none (" in capsys.readouterr().out
    with (tmp_path / "shown" / "results.csv").open(newline="") as file:
        assert {row["guarantee"] for row in csv.DictReader(file)} == set(RANKS)


def test_noise_from_seeds_is_marked_and_held_against_none_where_all_have_it(tmp_path):
    seeded = [
        made(method, 1, accuracy, guarantee="none", reason=reason, place=place)
        for place, (method, accuracy, reason) in enumerate(
            [("a", 0.7, SEEDED_NOISE), ("b", 0.6, SEEDED_NOISE), ("c", 0.9, f"g: if so; {SEEDED_NOISE}")]
        )
    ]
    table = markdown_table(seeded)
    assert "| A ‡ | **0.700** ‡ |" in table
    assert "| C ‡ | 0.900 ‡ |" in table  # a condition of its own on top
    assert "| *best* | A (C ‡ is ahead) |" in table
    assert table.endswith(f"‡ guarantee: none – {SEEDED_NOISE}. C: g: if so.")
    # Beside one run whose noise was cryptographic it is held against the others.
    assert best_at(cells_of([*seeded, made("d", 1, 0.1)]), 1) == "d"
    (axes,) = figure_of(seeded).axes
    styles = {container.get_label(): container[0].get_linestyle() for container in axes.containers}
    assert styles == {"A ‡": "-", "B ‡": "-", "C ‡": "--"}
    _, caption = figure_of(seeded).get_supxlabel().split("\n", 1)
    assert caption.replace("\n", " ").endswith(f"‡ guarantee: none – {SEEDED_NOISE}. C: g: if so.")
    assert digest_of(seeded) != digest_of([made("a", 1, 0.7), *seeded[1:]])


def test_what_a_file_does_not_say_is_never_read_as_unconditional(tmp_path):
    old = marked("unconditional")
    del old["guarantee"], old["reason"]
    charge = Charge(Gaussian(10.0), 3)
    late, none = Guarantee("conditional", ("late",)), Guarantee("none", ("drawn twice",))
    for number, (values, wanted) in enumerate(
        [
            (old, Guarantee("none", (NOT_RECORDED,))),
            ({**old, "guarantee": None}, Guarantee("none", (NOT_RECORDED,))),
            # Written before seeded noise took the guarantee.
            (marked("unconditional", noise_seeded=True), Guarantee("none", (SEEDED_NOISE,))),
            # The releases say less than the file's own word.
            (marked("unconditional", records=[charge.with_guarantee(late).to_record()]), late),
            (marked("conditional", records=[charge.with_guarantee(none).to_record()]),
             Guarantee("none", ("if so", "and so", "drawn twice"))),
            # The file's own word says less than its releases.
            (marked("none", records=[charge.to_record()]), Guarantee("none", (SEEDED_NOISE,))),
            (marked("unconditional", records=[charge.to_record()]), Guarantee()),
        ]
    ):  # fmt: skip
        (result,) = read_results(store(tmp_path / str(number), values))
        assert result.guarantee == wanted
    without_reason = guarantee_of({"guarantee": "conditional", "reason": ""})
    assert (without_reason.level, len(without_reason.reasons)) == ("conditional", 1)
    contradiction = {"guarantee": "unconditional", "reason": "if so"}
    odd = ({"method": 1.5}, {"title": None}, {"place": "1"}, {"records": {}})
    for bad in ({"guarantee": "sure"}, contradiction, {"records": [{"mechanism": "x"}]}, *odd):
        with pytest.raises(ValueError, match=r"0\.json is not a result of a comparison"):
            read_results(store(tmp_path / "bad", {**marked("unconditional"), **bad}))


def test_footnotes_name_shared_reasons_once():
    none, other, if_so = (
        Guarantee(*one) for one in (("none", ("s",)), ("none", ("b",)), ("conditional", ("b",)))
    )
    named = [("A", none), ("B", none & if_so), ("C", if_so)]
    assert footnotes(named) == ["† guarantee: conditional – b.", "‡ guarantee: none – s. B: b."]
    assert footnotes([("A", none), ("B", other), ("C", other)]) == ["‡ guarantee: none. A: s. B, C: b."]
    assert footnotes([("A", Guarantee())]) == []


def levels_of(value, level=None):
    """Guarantee of each mapping with an ε in a stored benchmark: the nearest one above it."""
    if isinstance(value, list):
        for item in value:
            yield from levels_of(item, level)
    elif isinstance(value, dict):
        level = value.get("guarantee", level)
        known = [x for name, x in value.items() if name.startswith("epsilon")]
        if any(not isinstance(x, list | type(None)) for x in known):
            yield level
        for item in value.values():
            yield from levels_of(item, level)


#: Benchmarks with noise of the operating system's generator; all others draw it from seeds.
OF_THE_SYSTEM = (
    "private_training", "compare_fashion_mnist", "compare_fashion_mnist_attributes",
    "compare_bbc_news", "recipes",
)  # fmt: skip

#: Arithmetic on plans: no run, no noise, no guarantee.
COMPUTED = ("accountants",)


def test_every_stored_figure_says_how_its_noise_was_drawn():
    counted = 0
    for name in set(names()) - set(COMPUTED):
        for part, measured in entries(name).items():
            own = "conditional" if part.startswith("guided_pate") else "unconditional"
            for level in levels_of(measured["results"]):
                counted += 1
                assert level == (own if name in OF_THE_SYSTEM else "none"), (name, part)
    assert counted


def test_a_method_has_one_colour_on_all_plots_and_its_models_differ_by_markers():
    student, head = ("public_curvature, student", "public_curvature, head")
    many = styles(["mine", "private_knn", student, head, "yours", "pate"])
    few = styles(["pate", "private_knn", "other"])
    assert [many[name] for name in ("private_knn", "pate")] == [few[name] for name in ("private_knn", "pate")]
    assert many[student][0] == many[head][0]
    assert len(set(many.values())) == len(many)
    assert len({colour for colour, _ in many.values()}) == len(many) - 1
