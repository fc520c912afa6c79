"""What a training configuration may release at most, without running it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import check_int
from pl_privknn.privacy.release_files import Releases

if TYPE_CHECKING:
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.privacy.mechanisms import Charge

#: Rooms whose classes YAML names without a module path.
ROOMS_NAMED_IN_YAML = (
    "datamodules",
    "features",
    "labelers",
    "privacy.mechanisms",
    "privacy.noise",
    "students",
)


def plan_of_config(document: dict[str, Any], path: str | Path, num_classes: int | None = None) -> Releases:
    """The plan that the ``labeling`` section of a configuration states before its first query.

    Args:
        document: the configuration: a ``labeling`` section, and a ``data`` section that tells the number of
            classes.
        path: where it came from, for messages.
        num_classes: number of classes, for a fragment without ``data``.

    Raises:
        ValueError: for sections that don't parse, a missing number of classes, or a number of queries that only
            the data tells.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    for room in ROOMS_NAMED_IN_YAML:
        importlib.import_module(f"pl_privknn.{room}")
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.datamodules.base import PrivatePublicDataModule

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PrivateLabeler, "labeling")
    if "data" in document:
        parser.add_subclass_arguments(PrivatePublicDataModule, "data")
    sections = {name: document[name] for name in ("labeling", "data") if name in document}
    try:
        made = parser.instantiate_classes(parser.parse_object(sections))
    except ArgumentError as error:
        raise ValueError(f"{path}: {error}") from error
    labeling = made.labeling
    if labeling.labeler is None:
        raise ValueError(f"{path}: its labeling section has no labeler, so nothing is released")
    if num_classes is None:
        if "data" not in made:
            raise ValueError(
                f"num_classes=None: {path} has no data section that tells it; pass it (--num-classes)"
            )
        num_classes = made.data.num_classes
    charges = labeling_plan(labeling, check_int("num_classes", num_classes, minimum=2), str(path))
    return Releases(tuple(charges), labeling.delta, labeling.adjacency)


def labeling_plan(
    labeling: PrivateLabeler, num_classes: int, path: str, public_examples: int | None = None
) -> list[Charge]:
    """The most that a labeling section can cost.

    Args:
        labeling: the section's callback.
        num_classes: number of classes.
        path: where it came from, for messages.
        public_examples: size of the public set, for a section that asks about all of it.

    Raises:
        ValueError: for a number of queries that only the data tells.
    """
    assert labeling.labeler is not None
    if labeling.selects_all and public_examples is None:
        raise ValueError(
            f"{path}: selection: all asks as many queries as there are public examples, which the configuration "
            "does not say; audit the ledger of a run instead"
        )
    queries = sum(labeling.queries_per_round)
    if labeling.selects_all and public_examples is not None:
        queries = public_examples * labeling.rounds
    answers = queries if labeling.max_answers is None else min(labeling.max_answers, queries)
    return labeling.labeler.stated_plan(queries, answers, num_classes, rounds=labeling.rounds)
