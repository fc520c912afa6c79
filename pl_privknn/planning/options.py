"""How a teacher is planned: what may be said of it, and how that becomes the labeler and its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from pl_privknn import labelers
from pl_privknn.privacy import mechanisms
from pl_privknn.privacy.mechanisms import Charge

#: Teachers whose settings can be searched; see :mod:`pl_privknn.planning.vote_search`.
SEARCHED = ("private-knn", "reverse-knn")
_BARE = (*vars(labelers).values(), *vars(mechanisms).values())


class Option(NamedTuple):
    """An argument of :func:`plan` and an option of the command line.

    Attributes:
        name: of the argument.
        kind: its type, or the words that it may be.
        text: for help.
        default: where it is left out; None for what may be looked for.
        flag: on the command line; the name by default.
        required: must be given.
    """

    name: str
    kind: Any
    text: str
    default: Any = None
    flag: str | None = None
    required: bool = False

    @property
    def switch(self) -> str:
        """On the command line."""
        return f"--{self.flag or self.name.replace('_', '-')}"


class Made(NamedTuple):
    """A class of the project and its arguments: an object, and what configuration says for it."""

    cls: type
    arguments: dict[str, Any]

    def make(self) -> Any:
        """The object."""
        arguments = self.arguments.items()
        return self.cls(**{name: v.make() if isinstance(v, Made) else v for name, v in arguments})

    def config(self) -> dict[str, Any]:
        """As YAML states it."""
        arguments = self.arguments.items()
        plain = {name: v.config() if isinstance(v, Made) else v for name, v in arguments}
        if self.cls is labelers.Screening:
            return plain
        name = self.cls.__name__ if self.cls in _BARE else f"{self.cls.__module__}.{self.cls.__name__}"
        return {"class_path": name, "init_args": plain}


@dataclasses.dataclass(frozen=True)
class Row:
    """How one teacher is planned.

    Attributes:
        title: of the plan.
        free: what may be looked for, and where a search starts; None for noise, which starts at the textbook's.
        counted: the parameter on the axis of the plan's curve.
        shown: parameters in the order of the plan's table; ``"*"`` for the free ones.
        options: see :class:`Option`.
        make: the labeler, from all options; for others their releases.
        start: of noise: the sensitivity over the deviation of unit noise, and the number of releases.
        exact: give the exact worst case.
    """

    title: str
    free: dict[str, float | None]
    counted: str
    shown: tuple[str, ...]
    options: tuple[Option, ...]
    make: Callable[[SimpleNamespace], Made | list[Charge]]
    start: Callable[[SimpleNamespace], tuple[float, float]]
    exact: bool = True
