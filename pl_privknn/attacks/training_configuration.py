"""A configuration of a private training as the target of an attack."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pl_privknn.attacks.training import TrainingTarget
from pl_privknn.baselines import NoisySGD
from pl_privknn.comparison.spec import SpecError
from pl_privknn.comparison.tuning import made_data, made_model
from pl_privknn.configuration import ConfigurationError, class_named, instantiate
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.nested_settings import get
from pl_privknn.training import PrivateTraining

#: What of the trainer's options a training's plan or its sums depend on.
_TRAINER = ("max_epochs", "max_steps", "accelerator", "precision")


def is_training(document: Mapping[str, Any]) -> bool:
    """Whether a configuration trains on the private records itself: by NoisySGD or PrivateTraining."""
    return "labeling" not in document and (_is_noisy_sgd(document) or _callback(document) is not None)


def training_of_config(document: Mapping[str, Any], path: str | Path) -> TrainingTarget:
    """The training of a configuration; like ``privknn fit``, it runs the code that the configuration names.

    Other callbacks of the trainer are left out: they see what the training released alone.

    Args:
        document: the configuration, with sections ``model``, ``data`` and ``trainer``.
        path: where it came from, for messages.

    Raises:
        ValueError: for sections that don't parse.
    """
    try:
        trainer = {name: get(document, f"trainer.{name}") for name in _TRAINER}
        section = document.get("model")
        if not isinstance(section, Mapping) or "class_path" not in section:
            raise ConfigurationError("model: want a class_path, and its arguments as init_args")
        data = made_data(document.get("data") or {})
        if not isinstance(data, PrivatePublicDataModule):
            raise ConfigurationError(
                "data.class_path: want a data module with a private part (PrivatePublicDataModule)"
            )
        name = "NoisySGD" if _is_noisy_sgd(document) else "PrivateTraining"
        model = {**section, "init_args": {**(section.get("init_args") or {})}}

        def make() -> tuple[Any, PrivateTraining | None]:
            if name == "NoisySGD":
                return made_model({"model": model}, data, "model"), None
            callback = _callback(document)
            assert callback is not None
            arguments = {"training": callback.get("init_args") or {}}
            training = instantiate(arguments, {"training": PrivateTraining}).training
            return _made_module(model, data), training

        make()  # what can't be made is said before anything is trained
    except (ConfigurationError, SpecError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return TrainingTarget(
        make, data, {key: value for key, value in trainer.items() if value is not None}, name
    )


def _is_noisy_sgd(document: Mapping[str, Any]) -> bool:
    found = class_named(str(get(document, "model.class_path")))
    return found is not None and issubclass(found, NoisySGD)


def _callback(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section of the callback that trains privately, if there is one."""
    given = get(document, "trainer.callbacks") or []
    for section in given if isinstance(given, list) else [given]:
        if isinstance(section, dict) and class_named(str(section.get("class_path"))) is PrivateTraining:
            return section
    return None


def _made_module(section: Mapping[str, Any], data: PrivatePublicDataModule) -> Any:
    """The module, of the data's classes and shape where its class asks for them and the file does not say."""
    made = class_named(str(section["class_path"]))
    if made is None:
        raise ConfigurationError(
            f"model.class_path={section['class_path']!r} is no class that can be imported"
        )
    channels, _, side = data.image_shape
    stated = {"num_classes": data.num_classes, "task": data.task, "in_channels": channels, "image_size": side}
    asked = inspect.signature(made).parameters
    arguments = {name: value for name, value in stated.items() if name in asked} | dict(section["init_args"])
    return instantiate({"model": arguments}, {"model": made}).model
