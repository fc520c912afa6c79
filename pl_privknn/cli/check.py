"""``privknn check``: inspect data before a run, or test a labeler class."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import counted
from pl_privknn.cli.common import importable
from pl_privknn.cli.fit import add_recommended, recommended

if TYPE_CHECKING:
    from pl_privknn.datamodules import PrivatePublicDataModule
    from pl_privknn.labelers.base import Labeler


def add_check(commands: Any) -> None:
    """Register ``privknn check`` with argparse's subparsers."""
    text = "inspect your data before a run, or test a labeler class"
    check = commands.add_parser("check", help=text, description=text)
    check.add_argument(
        "labeler",
        nargs="?",
        metavar="CLASS",
        help="a built-in labeler, or the import path of a class that needs no arguments; tested by check_labeler",
    )
    title = "instead of CLASS: data, recommended run and its size; spends no budget and writes no file"
    add_recommended(check.add_argument_group(title), required=False)
    check.set_defaults(run=_run_check)


def _run_check(parsed: argparse.Namespace) -> int:
    wanted = (parsed.data, parsed.epsilon, parsed.private_records)
    if parsed.labeler is None:
        if None in wanted:
            raise ValueError(
                "nothing to check; give --data PATH --epsilon ε --private-records N, or a labeler class"
            )
        return _check_data(parsed)
    if any(value is not None for value in wanted):
        raise ValueError(f"{parsed.labeler}: give either a labeler class or --data PATH, not both")
    return _check_labeler(parsed.labeler)


def _check_labeler(name: str) -> int:
    from pl_privknn.testing import LabelerCheckError, check_labeler

    kind = labeler_class(name)
    try:
        labeler = kind()
    except TypeError as error:
        raise ValueError(
            f"{name}: can't be constructed without arguments ({error}); give them defaults, or call "
            "pl_privknn.testing.check_labeler(labeler)"
        ) from error
    try:
        print(check_labeler(labeler))
    except LabelerCheckError as error:
        print(error)
        return 1
    return 0


def labeler_class(name: str) -> type[Labeler]:
    """The labeler class of a name: a built-in one, or an import path.

    Raises:
        ValueError: for anything else.
    """
    import importlib

    from pl_privknn import labelers
    from pl_privknn.labelers.base import Labeler

    module, _, attribute = name.rpartition(".")
    with importable(["."]):
        try:
            found = getattr(importlib.import_module(module) if module else labelers, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{name} must be a built-in labeler, such as PrivateKNN, or an import path ({error})"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Labeler)):
        raise ValueError(f"{name} is not a subclass of Labeler")
    return found


def _check_data(parsed: argparse.Namespace) -> int:
    """Print the public facts of the data, the recommended run and its size.

    Private records are not loaded: their content, and which of them a run leaves out, is unknown here.
    """
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        found = recommended(parsed)
    data, sizes = found.data, found.sizes
    unit = found.config["labeling"]["budget"].get("unit", "record")
    but = ", except the names of its classes" if data.conditions else ""
    print(f"Private part: not loaded{but}; {counted(sizes.private_records, unit)} (your estimate).")
    truth = data.public.truth if data.has_public else None
    print(_part("Public part", sizes.public, truth, data))
    print(_part("Test part", len(data.test), data.test.labels, data))
    for note in dict.fromkeys(str(one.message) for one in notes if one.category is UserWarning):
        print(f"Note: {note}.")
    if data.leaves_out and data.unusable == "leave_out":
        print(f"A run leaves out private records {data.leaves_out}, if there are any.")
    return 0


def _part(name: str, count: int, labels: Any, data: PrivatePublicDataModule) -> str:
    """Size of a public part, and its number of labelled examples of each class."""
    if labels is None or not count:
        return f"{name}: {counted(count, 'example') if count else 'none'}."
    attributes = data.task == "multilabel"
    each = range(data.num_classes)
    sizes = [int(((labels[:, one] == 1) if attributes else (labels == one)).sum()) for one in each]
    known = ", ".join(f"{word} {size}" for word, size in zip(data.class_names, sizes, strict=True))
    return f"{name}: {counted(count, 'example')}; {'with attribute' if attributes else 'labelled'}: {known}."
