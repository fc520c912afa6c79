"""The queries of a run as a table: public picture, what was answered, what is true."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_privknn.callbacks.label_run import LABELS
from pl_privknn.callbacks.public_pictures import PublicPictures
from pl_privknn.callbacks.stored_labels import StoredLabels


@dataclasses.dataclass(frozen=True)
class PicturedQuery:
    """One query about a public example of which the run kept a picture.

    Attributes:
        example: the public example.
        round: the round, from 1.
        state: ``"answered"``, ``"refused"`` or ``"lost"``.
        label: the released label for people; None where none was.
        truth: the public truth for people; None where it isn't known.
        right: whether both agree; None where one is missing.
        image: uint8 ``(height, width)`` or ``(height, width, 3)``.
    """

    example: int
    round: int
    state: str
    label: str | None
    truth: str | None
    right: bool | None
    image: NDArray[np.uint8]

    def plain(self) -> dict[str, Any]:
        """Everything but the picture."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:-1]}


def pictured_queries(folder: Path) -> list[PicturedQuery]:
    """The queries in a run's folder, in the order in which they were asked; those without a picture are left out.

    Raises:
        ValueError: if a file can't be read as what it is.
    """
    pictures = PublicPictures.read(folder)
    if pictures is None or not (folder / LABELS).is_file():
        return []
    store = StoredLabels(folder / LABELS)
    try:
        queries = store.queries()
        examples, labels, _ = store.answers(store.rounds())
    finally:
        store.close()
    label_of = dict(zip(examples.tolist(), labels.tolist(), strict=True))
    image_of = dict(zip(pictures.examples.tolist(), pictures.images, strict=True))
    found = []
    for query in queries:
        if query.example not in image_of or query.state == "not asked":
            continue
        label = label_of.get(query.example) if query.state == "answered" else None
        known = len(pictures.truth) > 0 and bool((pictures.truth[query.example] >= 0).all())
        truth = pictures.truth[query.example].tolist() if known else None
        image = image_of[query.example]
        found.append(
            PicturedQuery(
                example=query.example,
                round=query.round + 1,
                state=query.state,
                label=name_of(label, pictures.class_names),
                truth=name_of(truth, pictures.class_names),
                right=None if label is None or truth is None else label == truth,
                image=image[..., 0] if image.shape[-1] == 1 else image,
            )
        )
    return found


def name_of(label: int | list[int] | None, names: tuple[str, ...]) -> str | None:
    """A class, or the attributes that are on, for people."""
    if isinstance(label, list):
        return ", ".join(name for name, on in zip(names, label, strict=True) if on == 1) or "none"
    return None if label is None else names[label]
