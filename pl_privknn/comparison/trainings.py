"""The private training of a configuration: a module that trains itself, or one that ``PrivateTraining`` trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from pl_privknn import _lightning as pl
from pl_privknn.comparison.spec import SpecError
from pl_privknn.config import (
    ConfigurationError,
    class_named,
    get,
    instantiate,
    known_classes,
    made_by,
    merged,
    one_line,
)
from pl_privknn.training import NoisySGD, PrivateTraining


def trains_itself(document: Mapping[str, Any]) -> bool:
    """Whether the module is a :class:`~pl_privknn.training.noisy_sgd.NoisySGD`."""
    found = class_named(str(get(document, "model.class_path")))
    return found is not None and issubclass(found, NoisySGD)


def training_sections(document: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The sections of callbacks that train privately, and those of all others."""
    given = get(document, "trainer.callbacks") or []
    found: tuple[list[dict[str, Any]], list[Any]] = ([], [])
    for section in given if isinstance(given, list) else [given]:
        private = isinstance(section, dict) and class_named(str(section.get("class_path"))) is PrivateTraining
        found[0 if private else 1].append(section)
    return found


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a configuration trains on the private records itself."""
    return "labeling" not in document and (trains_itself(document) or bool(training_sections(document)[0]))


def made_data(section: Mapping[str, Any]) -> Any:
    """The data module of a configuration.

    Raises:
        SpecError: for a section that does not parse.
    """
    known_classes()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.both("LightningDataModule"), "data")
    try:
        return made_by(parser, {"data": merged(section, None)}).data
    except (ArgumentError, TypeError, ValueError) as error:
        raise SpecError(f"data: {one_line(error)}") from error


def made_training(
    document: Mapping[str, Any], data: Any, name: str
) -> tuple[pl.LightningModule, PrivateTraining]:
    """The module, and the callback that trains it, which may be the module's own.

    A module's classes, task and image size are those of the data where its class asks for them and the file does not
    say.

    Args:
        document: the configuration.
        data: the data module.
        name: of the training, for messages.

    Raises:
        SpecError: for sections that don't parse.
    """
    section = document.get("model")
    if not isinstance(section, Mapping) or "class_path" not in section:
        raise SpecError(f"{name}: model: want a class_path, and its arguments as init_args")
    made = class_named(str(section["class_path"]))
    if made is None:
        raise SpecError(
            f"{name}: model.class_path={section['class_path']!r} is no class that can be imported"
        )
    channels, _, side = data.image_shape
    stated = {"num_classes": data.num_classes, "task": data.task, "in_channels": channels, "image_size": side}
    asked = inspect.signature(made).parameters
    arguments = {key: value for key, value in stated.items() if key in asked}
    try:
        module = instantiate(
            {"model": arguments | merged(section.get("init_args") or {}, None)}, {"model": made}
        ).model
        if trains_itself(document):
            return module, module.private_training
        callback = {"training": training_sections(document)[0][0].get("init_args") or {}}
        return module, instantiate(callback, {"training": PrivateTraining}).training
    except ConfigurationError as error:
        raise SpecError(f"{name}: {error}") from error
