"""A configuration of a private training as the target of an attack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pl_privknn.attacks.training import TrainingTarget
from pl_privknn.comparison.spec import SpecError
from pl_privknn.comparison.trainings import made_data, made_training, trains_itself
from pl_privknn.configuration import ConfigurationError
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.nested_settings import get
from pl_privknn.training import PrivateTraining

#: What of the trainer's options a training's plan or its sums depend on.
_TRAINER = ("max_epochs", "max_steps", "accelerator", "precision")


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
        data = made_data(document.get("data") or {})
        if not isinstance(data, PrivatePublicDataModule):
            raise ConfigurationError(
                "data.class_path: want a data module with a private part (PrivatePublicDataModule)"
            )
        name = "NoisySGD" if trains_itself(document) else "PrivateTraining"

        def make() -> tuple[Any, PrivateTraining | None]:
            return made_training(document, data, name)

        make()  # what can't be made is said before anything is trained
    except (ConfigurationError, SpecError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return TrainingTarget(
        make, data, {key: value for key, value in trainer.items() if value is not None}, name
    )
