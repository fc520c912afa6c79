"""Recommendation without public examples: the run pays for rows that are drawn, or learns nothing from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pl_privknn._checks import counted
from pl_privknn.callbacks.selection import FullSelection
from pl_privknn.datamodules.base import UNKNOWN, PrivatePublicDataModule
from pl_privknn.datamodules.tables import TableDataModule
from pl_privknn.features.base import Extractor, Pixels
from pl_privknn.features.hog import HOG
from pl_privknn.features.joined import JoinedFeatures
from pl_privknn.features.pretrained import TimmFeatures
from pl_privknn.labelers.linear_models import PreconditionedGradients, SufficientStatistics
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.holdout import MOST_ERROR, PaidEvaluation, calibrated, error_of, records_for
from pl_privknn.recommendation.rules import (
    WHY,
    Parts,
    Setting,
    Sizes,
    parts_of,
    private_in_words,
    takes_pretrained,
)

# Without public data: largest side of images that HOG serves too, and shares of HOG and of the network. Class sums at
# ε 1 reach 0.78 on digits (20 pixels a side) and 0.68 on Fashion-MNIST (28) with both, 0.43 and 0.71 with the network
# alone: means of three seeds.
_SMALL, _SHARES = 64, (0.3, 0.7)


def from_drawn_rows(data: TableDataModule, sizes: Sizes, setting: Setting) -> tuple[tuple[str, ...], Parts]:
    """Reasons and objects of a table without public rows, which the run pays for."""
    measured, records, accuracy = _held_out(data, sizes)
    parts = parts_of(setting, dataclasses.replace(sizes, private_records=records))
    labeler = PreconditionedGradients(
        private_records=records
    )  # drawn rows have the centre of the private ones
    parts = Parts(
        {**parts.student, "network": "linear_probe"},
        {**parts.labeling, "labeler": labeler, "released": "head", **measured},
        {"max_epochs": 1},
    )
    settings, schema = data.public_rows, data.schema
    left = data.budget_left(Budget(sizes.epsilon, sizes.delta)).epsilon
    unbounded = ""
    if schema.unbounded:
        unbounded = (
            f" Bounds of {counted(data.unbounded, 'column')} of numbers are not stated (--bounds), and are paid "
            f"for too ({settings.bounds:g} of μ, twice)."
        )
    return (
        f"{counted(len(schema.names), 'column')}, {_labels(data, sizes)}; {private_in_words(sizes)}.",
        f"Public rows: there are none, so the run pays for histograms of the columns ({settings.histograms:g} of μ) "
        f"and for their second moments ({settings.moments:g} of μ), and draws {settings.rows} rows that have both; "
        f"ε {left:.3g} is left to the teacher.{unbounded}",
        f"Teacher: released gradients, whose linear model is the result. {WHY[setting.teacher]}",
        f"Features: normal scores of numbers and one-hot categories, {setting.width} principal components of a "
        "kernel, learned from the drawn rows.",
        *_named(data),
        *(f"Condition of the guarantee: {condition}." for condition in data.conditions),
        accuracy,
    ), parts


def without_public(data: PrivatePublicDataModule, sizes: Sizes) -> tuple[tuple[str, ...], Parts]:
    """Reasons and objects of a teacher without public data, whose model is the result."""
    table, pretrained = len(data.image_shape) == 1, takes_pretrained(data)
    kinds: list[Extractor] = [Pixels()] if table else [TimmFeatures()] if pretrained else [HOG()]
    named = "embeddings" if table else "a network with ImageNet weights" if pretrained else "HOG"
    if pretrained and max(data.image_shape[1:]) <= _SMALL:
        kinds, named = [HOG(), *kinds], f"HOG and {named}"
    features = kinds[0] if len(kinds) == 1 else JoinedFeatures(kinds, _SHARES)
    labeling: dict[str, Any] = {
        "rounds": 1, "features": [features], "selection": FullSelection(), "released": "head"
    }  # fmt: skip
    measured, records, accuracy = _held_out(data, sizes)
    labeling |= measured
    arguments: dict[str, Any] = {"private_records": records}
    if sizes.task == "multilabel":
        arguments["task"] = sizes.task
    labeling = {"labeler": SufficientStatistics(**arguments), **labeling, "budget": sizes.budget}
    reasons = (
        f"No public examples, {_labels(data, sizes)}; {private_in_words(sizes)}.",
        f"Teacher: noisy sums of features by {sizes.labels} give a linear model, which is the result.",
        f"Features: {named}; nothing is learned from public examples.",
        "Unlabelled public examples of the same kind (--public PATH, or public/ in the folder) would allow features "
        "that are learned from them, teachers with less noise and a student.",
        *_named(data),
        *(f"Condition of the guarantee: {condition}." for condition in data.conditions),
        accuracy,
    )
    student = {"network": "linear_probe", "extractor": features}
    return reasons, Parts(student, labeling, {"max_epochs": 1})


def _labels(data: PrivatePublicDataModule, sizes: Sizes) -> str:
    """Number of classes or attributes, in words."""
    if data.owes_names and data.class_names == UNKNOWN:
        return "classes that the run pays for"
    return f"{sizes.num_classes} {sizes.labels}"


def _named(data: PrivatePublicDataModule) -> list[str]:
    """Line about classes and kinds of columns that the run pays for."""
    if (names := data.names) is None or not data.names_plan(Budget(1.0)):
        return []
    paid = [f"classes with many records ({names.share:g} of μ)"] * names.classes
    paid += [f"kinds of {counted(len(names.columns), 'column')} ({names.kinds:g} of μ)"] * bool(names.columns)
    count = counted(len(names.categories), "column")
    paid += [f"categories of {count} with many records ({names.values:g} of μ)"] * bool(names.categories)
    return [f"Not stated, and paid for: {', '.join(paid)}."]


def _held_out(data: PrivatePublicDataModule, sizes: Sizes) -> tuple[dict[str, Any], int, str]:
    """Arguments of the labeling that measure accuracy, records that are left to the teacher, and a line about it."""
    if len(data.test):
        return {}, sizes.private_records, "Accuracy: measured on the public test set."
    share = PaidEvaluation().share
    classes = None if sizes.task == "multilabel" else sizes.num_classes
    sigma = calibrated(classes, Budget(**sizes.budget)).sigma
    error = error_of(classes, sigma, share * sizes.private_records)
    known = f"the accuracy is known to ± {error:.2g}"
    if error > MOST_ERROR:
        known = (
            "these are too few records to know the accuracy: about "
            f"{math.ceil(records_for(classes, sigma) / share):,} give ± 0.1"
        )
    line = (
        f"Accuracy: a secret random share of {share:g} of the records is held out; its noisy confusion matrix is "
        f"released at ε {sizes.epsilon:g}; no record is in both parts; {known}."
    )
    return {"evaluate": {"share": share}}, round((1 - share) * sizes.private_records), line
