"""Private trainings and their data built from configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentError

from pl_privknn import _lightning as pl
from pl_privknn._lightning import LightningModule
from pl_privknn._parsing import Parser
from pl_privknn.config import (
    ConfigurationError,
    check_own_classes,
    class_named,
    get,
    instantiate,
    known_classes,
    merged_sections,
    one_line,
    parse_objects,
)
from pl_privknn.training.noisy_sgd import NoisySGD
from pl_privknn.training.private_training import PrivateTraining

#: What has no part in a plan, and may be large, read files, or run other code.
_LEFT_OUT = ("features", "teachers", "network", "extractor", "feature_head", "augment", "views")


def private_trainings(
    document: Mapping[str, Any], class_of: Callable[[str], type | None] = class_named
) -> Iterator[str]:
    """Dotted paths of the sections that train on the private records themselves.

    Args:
        document: the configuration.
        class_of: finds a class by its name; by default also those of other packages, which are imported.
    """
    callbacks = get(document, "trainer.callbacks")
    count = len(callbacks) if isinstance(callbacks, list) else 0
    for place in ("model", "trainer.callbacks", *(f"trainer.callbacks.{number}" for number in range(count))):
        found = class_of(str(get(document, f"{place}.class_path")))
        if found is not None and issubclass(found, NoisySGD | PrivateTraining):
            yield place


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a configuration trains on the private records itself."""
    return "labeling" not in document and any(private_trainings(document))


def made_data(section: Any, own_classes: bool = False) -> Any:
    """The data module of a configuration.

    Args:
        section: its class, or a mapping with the class and its arguments.
        own_classes: refuse classes of other packages, whose code would run, and leave out what has no part in a plan.

    Raises:
        ConfigurationError: for a section that is missing, does not parse, or names no data module.
    """
    if section is None:
        raise ConfigurationError(
            "there is no data section, which gives the classes and, for FullSelection, the number of queries"
        )
    known_classes()
    parser = Parser(exit_on_error=False)
    parser.add_subclass_arguments(pl.both("LightningDataModule"), "data")
    try:
        if own_classes:
            section = plan_section(section)
            check_own_classes(section, "data")
        return parse_objects(parser, {"data": section}).data
    except ConfigurationError:
        raise
    except (ArgumentError, ArithmeticError, TypeError, ValueError, KeyError) as error:
        raise ConfigurationError(f"data: {one_line(error)}") from error


def made_training(
    document: Mapping[str, Any], data: Any, name: str
) -> tuple[LightningModule, PrivateTraining]:
    """Module and the callback that trains it, which the module may provide.

    A module's classes, task and image size are those of the data where its class asks for them and the file does not
    say.

    Args:
        document: the configuration of a private training.
        data: the data module.
        name: of the training, for messages.

    Raises:
        ConfigurationError: for sections that don't parse.
    """
    section = document.get("model")
    if not isinstance(section, Mapping) or "class_path" not in section:
        raise ConfigurationError(f"{name}: model: expected a class_path, and its arguments as init_args")
    made = class_named(str(section["class_path"]))
    if made is None:
        raise ConfigurationError(f"{name}: model.class_path={section['class_path']!r} can't be imported")
    channels, _, side = data.image_shape
    stated = {"num_classes": data.num_classes, "task": data.task, "in_channels": channels, "image_size": side}
    asked = inspect.signature(made).parameters
    arguments = {key: value for key, value in stated.items() if key in asked}
    place = next(private_trainings(document))
    try:
        module = instantiate(
            {"model": arguments | merged_sections(section.get("init_args") or {}, None)}, {"model": made}
        ).model
        if place == "model":
            return module, module.private_training
        callback = {"training": get(document, f"{place}.init_args") or {}}
        return module, instantiate(callback, {"training": PrivateTraining}).training
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def plan_section(section: Any) -> Any:
    """Copy without the settings that do not affect a plan."""
    if not isinstance(section, Mapping):
        return section
    return {name: plan_section(value) for name, value in section.items() if name not in _LEFT_OUT}
