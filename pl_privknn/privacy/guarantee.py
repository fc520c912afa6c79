"""The word beside ε: how far it holds, as a value that composes and never gets stronger on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pl_privknn._checks import check_choice, shown

if TYPE_CHECKING:
    from pl_privknn.privacy.noise import NoiseSource

Level = Literal["unconditional", "conditional", "none"]
#: From strongest to weakest.
LEVELS: tuple[Level, ...] = ("unconditional", "conditional", "none")

SEEDED_NOISE = (
    "the noise came from a seed and not from the operating system's generator: whoever knows the seed can subtract "
    "it, so this ε is what the same run would have with cryptographic noise"
)
UNSTATED_NOISE = (
    "the noise came from the operating system's generator, and the plan holds under the ledger's adjacency; whoever "
    "charged the ledger did not say so"
)
SEVERAL_FILES = (
    "what each file plans was fixed before an answer of another was seen (ordinary composition; runs that share one "
    "ledger need no such condition)"
)


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """How far a stated ε holds.

    ``"unconditional"``: for all data, as it stands. ``"conditional"``: if each of ``reasons`` is true.
    ``"none"``: not at all, for each of ``reasons`` that says so.

    Composition is ``a & b``: the weaker level, all reasons. It is the only operation there is, so a guarantee
    can't get stronger; ``Guarantee()`` is its neutral element.

    Attributes:
        level: one of :data:`LEVELS`.
        reasons: what weakens it, in words that a reviewer understands; empty for ``"unconditional"``.

    Raises:
        ValueError: for another level, or reasons that do not fit it.

    Example:
        >>> Guarantee("conditional", ("A",)) & Guarantee("none", ("B",)) & Guarantee()
        Guarantee(level='none', reasons=('A', 'B'))
    """

    level: Level = "unconditional"
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("guarantee", self.level, LEVELS)
        listed = isinstance(self.reasons, list | tuple)
        if not listed or not all(isinstance(r, str) and r.strip() for r in self.reasons):
            raise ValueError(f"reasons={shown(self.reasons)} must be a list of sentences")
        object.__setattr__(self, "reasons", tuple(self.reasons))
        if (self.level == "unconditional") != (not self.reasons):
            raise ValueError(
                f"guarantee={self.level!r} with reasons={shown(list(self.reasons))}: an unconditional one has none, "
                "another one at least one"
            )

    def __and__(self, other: Guarantee) -> Guarantee:
        """The guarantee of two parts together."""
        level = LEVELS[max(LEVELS.index(self.level), LEVELS.index(other.level))]
        return Guarantee(level, tuple(dict.fromkeys([*self.reasons, *other.reasons])))

    @property
    def reason(self) -> str:
        """All reasons in one line; empty for an unconditional guarantee."""
        return "; ".join(self.reasons)


#: Holds for all data, as it stands.
UNCONDITIONAL = Guarantee()


def weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """The guarantee of all parts together; unconditional where there is none."""
    total = UNCONDITIONAL
    for guarantee in guarantees:
        total &= guarantee
    return total


def strength(level: Level) -> int:
    """A number for charts: 2 unconditional, 1 conditional, 0 none."""
    return len(LEVELS) - 1 - LEVELS.index(level)


def noise_guarantee(source: NoiseSource) -> Guarantee:
    """What a noise source lets a release keep: nothing, unless its words are cryptographic."""
    return UNCONDITIONAL if source.cryptographic else Guarantee("none", (SEEDED_NOISE,))
