"""What labels may be: classes, attributes, probabilities. Messages never show a private one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pl_privknn._checks import shape_text

Task = Literal["multiclass", "multilabel"]
TASKS: tuple[Task, ...] = ("multiclass", "multilabel")


def check_targets(
    name: str, labels: Tensor, count: int, num_classes: int, task: str, *, unknown_allowed: bool = False
) -> Tensor:
    """Return class indices (:func:`check_labels`) or attributes (:func:`check_attributes`), by ``task``."""
    check = check_attributes if task == "multilabel" else check_labels
    return check(name, labels, count, num_classes, unknown_allowed=unknown_allowed)


def check_attributes(
    name: str, labels: Tensor, count: int, num_attributes: int, *, unknown_allowed: bool = False
) -> Tensor:
    """Return ``labels`` as int64 0/1 attributes, or say what is wrong with them without showing one of them.

    Args:
        name: of the argument, for messages.
        labels: whole numbers or bool, shape ``(count, num_attributes)``; 1 where an image has the attribute.
        count: how many images there are.
        num_attributes: number of attributes a.
        unknown_allowed: -1 stands for "not known".

    Raises:
        ValueError: on a wrong shape, dtype or range.
    """
    if labels.shape != (count, num_attributes) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"{name}: shape {shape_text(labels.shape)}, {labels.dtype}; want whole numbers of shape "
            f"(n, {num_attributes}), a row of attributes (0 or 1) an image"
        )
    labels = labels.to(torch.int64)
    if bool(((labels < (-1 if unknown_allowed else 0)) | (labels > 1)).any()):
        unknown = " (or -1 where it isn't known)" if unknown_allowed else ""
        raise ValueError(f"{name}: some attributes are neither 0 nor 1{unknown}; remap them")
    return labels


def known_rows(labels: Tensor) -> Tensor:
    """Bool ``(n,)``: which rows of int64 labels, ``(n,)`` or ``(n, a)``, tell anything (-1: not known)."""
    return labels >= 0 if labels.ndim == 1 else (labels >= 0).any(dim=1)


def check_labels(
    name: str, labels: Tensor, count: int, num_classes: int, *, unknown_allowed: bool = False
) -> Tensor:
    """Return ``labels`` as int64, or say what is wrong with them without showing one of them.

    Args:
        name: of the argument, for messages.
        labels: whole numbers, shape ``(count,)``.
        count: how many labels there must be.
        num_classes: labels lie in ``[0, num_classes)``.
        unknown_allowed: -1 stands for "not known".

    Raises:
        ValueError: on a wrong shape, dtype or range.
    """
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.ndim != 1 or not whole:
        raise ValueError(
            f"{name}: shape {shape_text(labels.shape)}, {labels.dtype}; want whole numbers of shape (n,), "
            "one class index an image"
        )
    if len(labels) != count:
        raise ValueError(f"{name}: not as many labels as images; want one label an image")
    labels = labels.to(torch.int64)
    lowest = -1 if unknown_allowed else 0
    if bool(((labels < lowest) | (labels >= num_classes)).any()):
        unknown = " (or -1 where it isn't known)" if unknown_allowed else ""
        raise ValueError(
            f"{name}: some labels lie outside [0, num_classes={num_classes}){unknown}; remap them to "
            f"0 … {num_classes - 1} or correct num_classes"
        )
    return labels


def check_soft(soft: Tensor, known: Tensor, num_classes: int, task: str) -> Tensor:
    """Return ``soft`` as float32 on the CPU, or say what is wrong with it.

    Args:
        soft: probabilities, float, shape ``(n, num_classes)``; rows that are not ``known`` don't matter.
        known: bool, shape ``(n,)``.
        num_classes: number of classes, or of attributes.
        task: ``"multiclass"``, where rows sum to one, or ``"multilabel"``.

    Raises:
        ValueError: for another shape, or rows that are no probabilities.
    """
    if soft.shape != (len(known), num_classes) or not soft.is_floating_point():
        raise ValueError(
            f"soft: shape {shape_text(soft.shape)}, {soft.dtype}; want float of shape (n, {num_classes}), "
            "a row an image"
        )
    soft = soft.detach().to("cpu", torch.float32)
    answered = soft[known]
    if task == "multilabel":
        if not bool(((answered >= 0) & (answered <= 1)).all()):
            raise ValueError("soft: attributes of labelled images must be probabilities, from 0 to 1")
        return soft
    # Three decimals: probabilities may come from half precision.
    sums_to_one = ((answered.sum(1) - 1).abs() < 1e-3).all()
    if not bool(torch.isfinite(answered).all() & (answered >= 0).all() & sums_to_one):
        raise ValueError(
            "soft: rows of labelled images must be probabilities (finite, at least 0, sum 1); normalise them"
        )
    return soft
