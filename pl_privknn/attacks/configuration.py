"""A training configuration as the target of an attack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_privknn.attacks.target import Target
from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.callbacks.private_labeler import STUDENT, extractor_of
from pl_privknn.callbacks.selection import PublicPool
from pl_privknn.configuration import ConfigurationError, instantiate, known_classes, project_classes_only
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features.base import learn_publicly
from pl_privknn.planning.configuration_plan import labeling_plan

if TYPE_CHECKING:
    from pl_privknn.features.base import Extractor

_AT_ONCE = 1024


def target_of_config(document: dict[str, Any], path: str | Path) -> Target:
    """The labeler of a configuration, its private table in the features of the first round, and its queries.

    Later rounds are attacked as if they asked in those features too: a student is not trained. A data module of one's
    own is not run; attack it in Python, with :class:`~pl_privknn.attacks.target.Target`.

    Args:
        document: the configuration, with sections ``labeling`` and ``data``.
        path: where it came from, for messages.

    Raises:
        ValueError: for sections that don't parse, or labelers of other data than one class an image.
    """
    try:
        for name in ("labeling", "data"):
            if not isinstance(document.get(name), dict):
                raise ConfigurationError(f"there is no {name} section, so there is nothing to attack")
        sections = {name: project_classes_only(document[name], name) for name in ("labeling", "data")}
        labeling = instantiate({"labeling": sections["labeling"]}, {"labeling": PrivateLabeler}).labeling
        data = _data(sections["data"])
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if labeling.labeler is None or data.task != "multiclass" or labeling.labeler.tasks != ("multiclass",):
        raise ValueError(f"{path}: labeling.labeler must answer one class an image to be attacked")
    data.setup("fit")
    first = labeling.features[0]
    if first == STUDENT:
        raise ValueError(f"{path}: labeling.features begins with the student, which is not trained here")
    extract = extractor_of(first, nn.Identity())
    learn_publicly(extract, data.public.images)
    public = _of_public(data, extract)
    tables = [(extract(images), labels) for images, labels in data.private_batches(_AT_ONCE)]
    asking = [count for count in labeling.queries_per_round if count] or [len(public)]
    return Target(
        labeler=labeling.labeler,
        features=torch.cat([features for features, _ in tables]).float(),
        labels=torch.cat([labels for _, labels in tables]),
        public=public,
        queries=_queries(labeling, public, asking),
        num_classes=data.num_classes,
        rounds=len(asking),
        max_answers=labeling.max_answers,
        plan=labeling_plan(labeling, data.num_classes, str(path), len(public)),
        delta=labeling.delta,
        adjacency=labeling.adjacency,
    )


def _data(section: Any) -> PrivatePublicDataModule:
    section = {"class_path": section} if isinstance(section, str) else section
    name = str(section.get("class_path", "")).rsplit(".", 1)[-1]
    found = known_classes().get(name) or known_classes().get(section.get("class_path", ""))
    if found is None or not issubclass(found, PrivatePublicDataModule):
        raise ConfigurationError(f"data.class_path={name!r} must name a data module of this project")
    made: PrivatePublicDataModule = instantiate(
        {"data": section.get("init_args") or {}}, {"data": found}
    ).data
    return made


def _of_public(data: PrivatePublicDataModule, extract: Extractor | Callable[[Tensor], Tensor]) -> Tensor:
    everything = torch.arange(len(data.public))
    return torch.cat([extract(data.public.images(part)) for part in everything.split(_AT_ONCE)]).float()


def _queries(labeling: PrivateLabeler, public: Tensor, asking: list[int]) -> Tensor:
    """Of all rounds for teachers that answer queries one by one; else of the first, which later ones repeat."""
    assert labeling.labeler is not None
    count = sum(asking) if labeling.labeler.asks_in_batches else asking[0]
    pool = PublicPool(
        torch.full((len(public),), -1), torch.zeros(len(public), dtype=torch.bool), lambda: public
    )
    chosen = labeling.select(pool, min(count, len(public)), torch.Generator().manual_seed(labeling.seed))
    return chosen.query_features(public)
