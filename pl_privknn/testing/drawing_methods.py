"""The methods through which private values enter noise, watched without a labeler's help.

While a run lasts, every drawing method of every mechanism is replaced by one that notes what goes in and what comes
out. On the second table of a neighbouring pair the same outcomes are given again (*replayed*): adaptive composition
compares two tables at equal earlier answers, so what enters a release may differ by its sensitivity and by no more.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pl_privknn.labelers.pate_training import Partitioner
from pl_privknn.privacy.mechanisms import Mechanism
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.testing.errors import LabelerCheckError
from pl_privknn.testing.watch import Watch, WatchedNoise

#: Whether queries pass a screening: as drawn, all of them, or every second one.
Passing = Literal["drawn", "all", "half"]
#: (what enters on one table, what enters on the other) to (how far they differ, how far they may).
Measure = Callable[[Tensor, Tensor], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Entered:
    """Private values on their way into noise.

    Attributes:
        mechanism: draws the noise; what was charged, or the part of it that draws.
        values: what enters.
        measure: how far the values of two tables differ and may differ, for mechanisms whose fields do not say.
    """

    mechanism: Mechanism
    values: Tensor
    measure: Measure | None = None


#: Drawing methods of mechanisms, and what enters by their arguments.
DRAWING: dict[str, Callable[..., Entered]] = {
    **dict.fromkeys(
        ("add_noise", "argmax", "passes", "randomize"),
        lambda mechanism, values, noise: Entered(mechanism, values),
    ),
    "add_noise_to_multiples": lambda mechanism, counts, step, noise: Entered(
        mechanism, counts.double() * step
    ),
}


@dataclasses.dataclass(frozen=True)
class DrawingMethod:
    """A method, or a function of a module, through which private values enter noise.

    For a mechanism of your own whose drawing method has another name, or which states no sensitivity::

        def far(first, second):  # how far two tables' values are apart, and how far they may be
            return float((first - second).abs().max()), 1.0

        DrawingMethod(Staircase, "draw", lambda mechanism, values, noise: Entered(mechanism, values, far))

    Attributes:
        owner: class or module.
        name: of the method or function.
        enters: says what enters, from the arguments of a call (for a method, the object first).
    """

    owner: Any
    name: str
    enters: Callable[..., Entered]

    def view(
        self, watch: Watch, earlier: Any, original: Callable[..., Any], *given: Any, **named: Any
    ) -> tuple[list[Entered], Any]:
        """Call the method.

        Args:
            watch: of the run.
            earlier: the outcome on the other table of a pair; None on the first.
            original: the method.
            *given: its arguments.
            **named: likewise.

        Returns:
            What enters, and the outcome.
        """
        entered = self.enters(*given, **named)
        entered = dataclasses.replace(entered, values=entered.values.detach().clone())
        return [entered], original(*given, **named)


def mechanism_methods() -> list[DrawingMethod]:
    """Every drawing method that any known mechanism defines; yours too, once it is imported."""
    return [
        DrawingMethod(cls, name, enters)
        for cls in subclasses(Mechanism)
        for name, enters in DRAWING.items()
        if name in vars(cls) and not getattr(vars(cls)[name], "__isabstractmethod__", False)
    ]


@contextlib.contextmanager
def _replaced(owner: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Another method under a name that the class itself may have or have inherited, while this lasts."""
    own, kept = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)


def subclasses(cls: type) -> list[type]:
    """A class and all classes that derive from it."""
    children: list[type] = type.__subclasses__(cls)
    return [cls, *(found for child in children for found in subclasses(child))]


class WatchedMethods:
    """Watches drawing methods in one run.

    Args:
        watch: told of what enters.
        methods: which.
        passing: see :data:`Passing`.
        replay: outcomes of the run on the other table, given again in order; None draws.
    """

    def __init__(
        self,
        watch: Watch,
        methods: Sequence[DrawingMethod],
        passing: Passing = "drawn",
        replay: Sequence[Any] | None = None,
    ) -> None:
        self.watch, self.methods, self.passing, self.replay = watch, methods, passing, replay
        self.outcomes: list[Any] = []
        #: Parts that a conditional partitioner made; see :meth:`open`.
        self.parts: list[Tensor] = []
        self.parts_given: Sequence[Tensor] = ()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Watch, while this lasts.

        A partition whose guarantee is conditional is taken as given: the second table of a pair gets the parts of
        the first one.
        """
        with contextlib.ExitStack() as stack:
            for method in self.methods:
                original = getattr(method.owner, method.name)
                stack.enter_context(_replaced(method.owner, method.name, self._watched(method, original)))
            stack.enter_context(_replaced(Partitioner, "assign", self._assigning(Partitioner.assign)))
            yield

    def _watched(self, method: DrawingMethod, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            if self.watch.through:  # one behind another
                return original(*given, **named)
            self._check_source(method, [*given, *named.values()])
            earlier = self._earlier(method)
            self.watch.through = True
            try:
                entered, outcome = method.view(self.watch, earlier, original, *given, **named)
            finally:
                self.watch.through = False
            if earlier is not None:
                self._check_shape(entered, outcome, earlier)
                outcome = copy.deepcopy(earlier)
            elif method.name == "passes" and self.passing != "drawn":
                outcome = torch.arange(outcome.numel()).view(outcome.shape) % 2 == 0
                outcome = torch.ones_like(outcome) if self.passing == "all" else outcome
            self.watch.events.extend(entered)
            self.outcomes.append(copy.deepcopy(outcome))
            return outcome

        return watched

    def _earlier(self, method: DrawingMethod) -> Any:
        if self.replay is None:
            return None
        if len(self.outcomes) == len(self.replay):
            raise LabelerCheckError(
                f"what is released depends on the private table: at equal answers, {method.name} draws once more on "
                "one table than on the other. What is asked, and how often, must not depend on it"
            )
        return self.replay[len(self.outcomes)]

    def _check_shape(self, entered: Sequence[Entered], outcome: Any, earlier: Any) -> None:
        shapes = [getattr(value, "shape", None) for value in (outcome, earlier)]
        if shapes[0] != shapes[1]:
            raise LabelerCheckError(
                f"what is released depends on the private table: at equal answers, {entered[0].mechanism.kind} "
                f"releases shape {tuple(shapes[0] or ())} on one table and {tuple(shapes[1] or ())} on the other"
            )

    def _check_source(self, method: DrawingMethod, given: Sequence[Any]) -> None:
        for source in given:
            if isinstance(source, NoiseSource) and not (
                isinstance(source, WatchedNoise) and source.watch is self.watch
            ):
                raise LabelerCheckError(
                    f"{method.name} draws from {source!r} and not from the labeler's noise_source; get the noise "
                    "from self.paid(ledger, mechanism, count, key)"
                )

    def _assigning(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def assign(partitioner: Partitioner, *given: Any, **named: Any) -> Tensor:
            parts = original(partitioner, *given, **named)
            if not partitioner.condition:
                return parts
            if self.parts_given:
                parts, removed = self.parts_given[len(self.parts)], self.watch.removed
                if removed is not None:
                    parts = torch.cat([parts[:removed], parts[removed + 1 :]])
            self.parts.append(parts)
            return parts

        return assign
