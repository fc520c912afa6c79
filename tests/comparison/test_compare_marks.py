"""Tables, plots and files of comparisons show no guarantee stronger than that of their weakest run."""

import itertools
import re

import numpy as np
import pytest

from benchmarks.record import entries, names
from pl_privknn.comparison import markdown_table
from pl_privknn.comparison.plot import figure_of, results_digest
from pl_privknn.comparison.table import NOT_RECORDED, best_at, cells_of, footnotes, guarantee_of
from pl_privknn.privacy.mechanisms.base import SEEDED_NOISE, Guarantee
from tests.comparison.compare_setup import made

RANKS = {"unconditional": 0, "conditional": 1, "none": 2}
MARKS = {0: "", 1: "†", 2: "‡"}
REASONS = {"unconditional": "", "conditional": "if so; and so", "none": SEEDED_NOISE}


def test_a_cell_is_marked_by_its_weakest_run_in_table_and_plot():
    generator, levels, methods, targets = np.random.default_rng(0), list(RANKS), "abcd", (1, 2)
    for _ in range(2):
        drawn = {
            key: levels[generator.choice(3, p=(0.6, 0.2, 0.2))]
            for key in itertools.product(methods, targets, range(2))
        }
        results = [
            made(method, target, 0.5, seed, level, REASONS[level])
            for (method, target, seed), level in drawn.items()
        ]
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
        (axes,) = figure_of(results, "marks").axes
        for container in axes.containers:
            label = container.get_label()
            weakest = max(worst[label[0].lower(), target] for target in targets)
            assert label[1:].strip() == MARKS[weakest]
            assert (container[0].get_linestyle() == "--") == (weakest > 0)


def test_noise_from_seeds_is_marked_and_held_against_none_where_all_have_it():
    seeded = [
        made(method, 1, accuracy, guarantee="none", reason=reason)
        for method, accuracy, reason in (
            ("a", 0.7, SEEDED_NOISE), ("b", 0.6, SEEDED_NOISE), ("c", 0.9, f"g: if so; {SEEDED_NOISE}"),
        )
    ]  # fmt: skip
    table = markdown_table(seeded)
    assert "| A ‡ | **0.700** ‡ |" in table
    assert "| C ‡ | 0.900 ‡ |" in table  # a condition of its own on top
    assert table.endswith(f"‡ guarantee: none – {SEEDED_NOISE}. C: g: if so.")
    # Beside one run whose noise was cryptographic it is held against the others.
    assert best_at(cells_of([*seeded, made("d", 1, 0.1)]), 1) == "d"
    figure = figure_of(seeded, "seeded")
    (axes,) = figure.axes
    styles = {container.get_label(): container[0].get_linestyle() for container in axes.containers}
    assert styles == {"A ‡": "-", "B ‡": "-", "C ‡": "--"}
    _, caption = figure.get_supxlabel().split("\n", 1)
    assert caption.replace("\n", " ").endswith(f"‡ guarantee: none – {SEEDED_NOISE}. C: g: if so.")
    assert results_digest(seeded) != results_digest([made("a", 1, 0.7), *seeded[1:]])


def test_what_a_file_does_not_say_is_never_read_as_unconditional():
    for values, wanted in (
        ({}, Guarantee("none", (NOT_RECORDED,))),
        ({"guarantee": None, "reason": "x"}, Guarantee("none", (NOT_RECORDED,))),
        (
            {"guarantee": "conditional", "reason": "if so; and so"},
            Guarantee("conditional", ("if so", "and so")),
        ),
        ({"guarantee": "unconditional", "reason": ""}, Guarantee()),
    ):
        assert guarantee_of(values) == wanted
    without_reason = guarantee_of({"guarantee": "conditional", "reason": ""})
    assert (without_reason.level, len(without_reason.reasons)) == ("conditional", 1)
    for bad in ({"guarantee": "sure"}, {"guarantee": "unconditional", "reason": "if so"}):
        with pytest.raises(ValueError, match=r"guarantee|reason"):
            guarantee_of(bad)


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
