"""Faults of users in the six classes of Re:cord-play: the stored table holds today, and not without its guards.

Cases are in ``benchmarks/faults.py``. Those whose training or labelling goes on to the end are ``long``; what makes
them harmless or conditional has quick tests in ``training/test_traced_step.py`` and ``privacy/test_records.py``.
"""

import dataclasses
import math
import warnings

import pytest
import torch

from benchmarks.faults import CASES, CONDITIONAL, FAULTS, FOUND, HARMLESS, REFUSED, UNSEEN
from benchmarks.record import entries
from pl_privknn.auditing import bounds
from pl_privknn.callbacks import labeling_round, private_labeler
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features import alone
from pl_privknn.testing import check, distances
from pl_privknn.training import clipped_sums, private_data, private_training

STORED = {part: one["results"] for part, one in entries("faults").items()}
BY_PART = {f"{case.where}: {case.what}": case for case in CASES}
pytestmark = pytest.mark.filterwarnings("ignore")


def of_levels(*levels):
    return pytest.mark.parametrize("part", [p for p, one in STORED.items() if one["level"] in levels])


def run(part):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BY_PART[part].run()


def test_every_class_has_labelers_data_and_steps_and_all_are_stored():
    assert set(STORED) == set(BY_PART)
    assert {case.fault for case in CASES} == set(FAULTS)
    unseen = {part for part, one in STORED.items() if one["level"] == UNSEEN}
    assert unseen == {"data module: takes num_classes from the private labels"}  # the page says so


@of_levels(FOUND, REFUSED)
def test_what_is_found_or_refused_is_so_today(part):
    outcome = run(part)
    assert (outcome.level, outcome.said) == (STORED[part]["level"], STORED[part]["said"])


@pytest.mark.long
@of_levels(HARMLESS, CONDITIONAL, UNSEEN)
def test_what_goes_on_ends_as_stored(part):
    outcome = run(part)
    assert (outcome.level, outcome.said) == (STORED[part]["level"], STORED[part]["said"])


# ---------------------------------------------------------------------------- without the guard


def nothing(*given, **named):
    return ""


def note_moves(self, found):
    """``Largest.take`` without its error for a record that moves too much."""
    self.pairs += 1
    for move in found:
        self.moves[move.what] = dataclasses.replace(move, amount=1.0, allowed=math.inf, rounding=0.0)


def draws_anything(self, entered):
    self.entered.append(entered)


def passes_over_errors(made, subject, table, largest):
    try:
        return made(subject, passing="all").fit(table).label(table.queries)
    except (ValueError, RuntimeError):
        return None


#: Faults that a second guard notices, in other words, when the first is out.
GUARDED_TWICE = (
    "labeler: counts the classes that occur in the table",
    "extractor: standardises by the mean of its batch",
    "training step: normalises over the batch",
)
SENSITIVITY = (check.Largest, "take", note_moves)
GUARDS = {
    "labeler: sums clipped weights without a look for NaN": [SENSITIVITY],
    "labeler: counts the classes that occur in the table": [(check, "check_strangers", nothing)],
    "labeler: scales features by the table's largest values": [SENSITIVITY],
    "labeler: lets a record vote three times at the sensitivity of one vote": [SENSITIVITY],
    "labeler: weighs votes without a bound": [SENSITIVITY],
    "labeler: averages two draws and pays for one": [(distances.Pool, "take", draws_anything)],
    "labeler: draws the same noise again after a crash": [(check, "check_fresh_noise", nothing)],
    "labeler: halves the noise that was drawn": [(check, "check_same", nothing), SENSITIVITY],
    "labeler: seeds its noise": [(check, "check_source", nothing)],
    "labeler: raises where a class has one record": [(check, "_accepted", passes_over_errors)],
    "mechanism: draws half of the σ that it states": [(bounds, "refutes_pairs", lambda *a, **k: False)],
    "extractor: standardises by the mean of its batch": [(alone, "_close", lambda *a: True)],
    "data set: holds the table twice": [(private_data, "has_repeated_rows", lambda data: False)],
    "data module: validates on the private records": [
        (PrivatePublicDataModule, "_without_private", lambda self, name: getattr(self, name)()),
    ],
    "trainer: accumulates two batches": [(private_training, "check_trainer", nothing)],
    "trainer: clips the noisy gradient again": [(private_training, "check_trainer", nothing)],
    "trainer: stops early by the training loss": [(private_training, "check_readers", nothing)],
    "training step: looks at a batch several times a step (LBFGS)": [(private_training, "check_optimizers", nothing)],
    "training step: normalises over the batch": [(private_training, "check_layers", nothing)],
}  # fmt: skip
SLOW_GUARDS = {
    "extractor: divides by a deviation that is 0 for a blank image": [
        (labeling_round, "_finite", lambda features: features)
    ],
    "data module: centres images by their private mean, in load_private": [
        (private_labeler, "foreign_loader", lambda data: None)
    ],
    "data module: leaves out rare private classes, in load_private": [
        (private_labeler, "foreign_loader", lambda data: None)
    ],
    "data set: mixes two records in __getitem__": [(private_data, "foreign_reader", lambda data: None)],
    **{
        f"{where}: {what}": [(clipped_sums, "clip_factors", lambda norms, *rest: torch.ones_like(norms))]
        for where, what in (
            ("training step", "takes the logarithm of a negative number"),
            ("training step", "compares the records of a batch (contrastive loss)"),
            ("training step", "sums losses, times 10,000"),
            ("data set", "holds an image of NaN"),
        )
    },
}


def check_differs(part, guards, monkeypatch):
    for owner, name, instead in guards:
        monkeypatch.setattr(owner, name, instead)
    outcome = run(part)
    if part in GUARDED_TWICE:
        assert outcome.said != STORED[part]["said"]
    else:
        assert outcome.level != STORED[part]["level"]


@pytest.mark.parametrize("part", GUARDS)
def test_without_its_guard_a_fault_passes(part, monkeypatch):
    check_differs(part, GUARDS[part], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("part", SLOW_GUARDS)
def test_without_its_guard_a_run_has_another_end(part, monkeypatch):
    check_differs(part, SLOW_GUARDS[part], monkeypatch)
