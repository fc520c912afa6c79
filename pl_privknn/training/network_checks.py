"""Does every example have a gradient of its own? A network's values are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from pl_privknn.privacy.noisy_steps import clip_factors

#: Examples of a check: one alone says nothing of mixing, and of two some permutations can't be told.
EXAMPLES = 3
#: How far two ways of computing the same may differ. Rounding alone: single precision is for networks without double.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}


class RefusedError(ValueError):
    """What a check found, whatever else goes wrong there."""


class CannotRunError(ValueError):
    """The network takes no inputs of the shape that it is to be checked with."""


class ValueCheck:
    """A network beside itself: a batch of made-up examples, and the same examples one by one.

    Works on a copy in double precision on the CPU (in single precision where the network can't do double) without
    dropout and with its weights a little changed, since weights of zero would hide what lies before them. No
    record, no global random state and nothing of the network itself is touched.

    Args:
        network: without hooks.
        shape: of one input.

    Attributes:
        network: the copy.
        inputs: shape ``(3, *shape)``, from 0 to 1.
        targets: shape of the outputs, for :func:`squared_losses`.

    Raises:
        CannotRunError: if the network takes no such inputs.
        ValueError: for outputs of another form than logits.
    """

    #: What is checked, for messages, and the name of its outputs.
    subject, made = "network", "logits"
    targets: Any = None

    def __init__(self, network: nn.Module, shape: Sequence[int]) -> None:
        self._original = network
        outputs = self._first(
            lambda dtype: made_up((EXAMPLES, *shape), dtype),
            f"no inputs of shape {(EXAMPLES, *shape)}",
            "set in_channels and image_size, or use a network for such images",
        )
        if outputs.ndim != 2 or len(outputs) != EXAMPLES:
            raise ValueError(
                f"network: for {EXAMPLES} examples it returns shape {tuple(outputs.shape)}; want logits (b, classes)"
            )
        if not bool(torch.isfinite(outputs).all()):
            raise ValueError(
                "network: logits of made-up examples with values from 0 to 1 are not finite, so that it can't be "
                "checked; scale its inputs"
            )
        self.outputs = outputs
        self.targets = outputs + made_up(tuple(outputs.shape), outputs.dtype)

    def _first(self, inputs: Callable[[torch.dtype], Tensor], what: str, remedy: str) -> Tensor:
        """A first run, in double precision where the network can; it sets up all but the outputs."""
        failures = []
        for dtype, tolerance in _TOLERANCE.items():
            self.network, self.inputs, self.tolerance = self._copy(dtype), inputs(dtype), tolerance
            self._buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
            try:
                return self._run(self.inputs, self.targets).detach()
            except RefusedError:
                raise
            except Exception as error:  # whatever a network raises; no record is in reach
                failures.append(_first_line(error))
        raise CannotRunError(f"{self.subject}: it takes {what} ({failures[-1]}); {remedy}")

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        """A copy to work on, without layers that draw at random."""
        return _twin(self._original, dtype)

    def _made(self, inputs: Tensor, targets: Any) -> Tensor:
        """What the copy makes of inputs: an output an example."""
        made: Tensor = self.network(inputs)
        return made

    def _loss(self, made: Tensor, targets: Any) -> Tensor:
        """The loss of one example."""
        return squared_losses(made, targets).sum()

    def _check_one(self, place: int, made: Tensor) -> None:
        """One example by itself beside the batch."""
        if not self._same(self.outputs[place : place + 1], made):
            raise ValueError(
                f"network: {self._where()} mixes the examples of a batch (one alone gives other logits), so that "
                "no gradient belongs to one example; let each example be computed by itself"
            )

    def _run(self, inputs: Tensor, targets: Any, seed: int = 0) -> Tensor:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), _WithoutDropout():
            torch.manual_seed(seed)
            return self._made(inputs, targets)

    def compare(
        self,
        names: Sequence[str],
        method: str,
        clipped: Callable[[float], tuple[Tensor, Tensor]],
    ) -> None:
        """Compare the batch with its examples alone: outputs, and clipped gradients with those of autograd.

        Args:
            names: of the trained parameters.
            method: name of the clipping.
            clipped: for a bound, norms ``(parameters, examples)`` and the clipped sum, of the batch.

        Raises:
            ValueError: where they differ; it names the layer or the parameter.
        """
        norms, directions = self._alone(names)
        lengths = norms.norm(dim=0)
        bound = 0.5 * float(lengths[lengths > 0].min()) if bool((lengths > 0).any()) else 1.0
        try:
            with _WithoutDropout():
                found, total = clipped(bound)
        except ValueError:
            raise
        except Exception as error:  # whatever Opacus raises
            raise ValueError(
                f"{self.subject}: Opacus can't give per-example gradients of it under clipping={method!r} "
                f"({_first_line(error)}); use layers that Opacus supports, and no in-place operations"
            ) from None
        remedy = (
            "Let each parameter serve one layer, called once a batch, on contiguous inputs and without "
            "torch.nn.functional beside it, and let no example see another one"
        )
        wrong = ((found - norms).abs() > self.tolerance * lengths).any(dim=1)
        if bool(wrong.any()):
            raise ValueError(
                f"{self.subject}: clipping={method!r} takes {names[int(wrong.int().argmax())]!r} for more, or "
                f"less, than it is of one example's gradient, so that clip_norm would not bound a record. {remedy}"
            )
        kept = float(clip_factors(torch.tensor([2.0 * bound], dtype=torch.float64), bound)) * 2.0 * bound
        if float((total - kept * directions).norm()) > self.tolerance * bound * EXAMPLES:
            raise ValueError(
                f"{self.subject}: the sum of gradients under clipping={method!r} is not that of its examples one by "
                f"one, so that clip_norm would not bound a record. {remedy}"
            )

    def _alone(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Each example by itself: it gives the batch's outputs, and by autograd a gradient.

        Returns:
            Norms, shape ``(parameters, examples)``, and the sum of all gradients at length one, flattened.
        """
        found = dict(self.network.named_parameters())
        parameters = [found[name] for name in names]
        norms = torch.zeros(len(names), EXAMPLES, dtype=self.inputs.dtype)
        total = torch.zeros(sum(p.numel() for p in parameters), dtype=self.inputs.dtype)
        for place, (x, y) in enumerate(zip(self.inputs.split(1), self.targets.split(1), strict=True)):
            try:
                made = self._run(x, y)
            except RefusedError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{self.subject}: it takes a batch and no single example ({_first_line(error)}); let it keep the "
                    "first dimension"
                ) from None
            if place == 0:
                self._check_repeats(x, y, made)
            self._check_one(place, made)
            pieces = torch.autograd.grad(self._loss(made, y), parameters, allow_unused=True)
            own = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, pieces, strict=True)]
            norms[:, place] = torch.stack([piece.norm() for piece in own])
            length = norms[:, place].norm()
            total += torch.cat([piece.flatten() for piece in own]) / (length if length > 0 else 1)
        return norms, total

    def _check_repeats(self, inputs: Tensor, targets: Any, outputs: Tensor) -> None:
        for name, buffer in self.network.named_buffers():
            if not torch.equal(buffer, self._buffers[name]):
                raise ValueError(
                    f"{self.subject}: its forward pass changes the buffer {name!r}, where something of private "
                    "examples would stay; leave buffers as they are in training"
                )
        if not self._same(outputs, self._run(inputs, targets, seed=1)):
            raise ValueError(
                f"{self.subject}: the same example gives other {self.made} in a second pass, so that it can't be "
                "checked; draw at random in dropout layers alone"
            )

    def _same(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        with torch.no_grad():
            return float((one - other).abs().max()) <= self.tolerance * float(one.abs().max())

    def _where(self) -> str:
        """The layer at which examples begin to mix."""
        batch = self._calls(self.inputs, self.targets)
        single = [
            self._calls(*pair) for pair in zip(self.inputs.split(1), self.targets.split(1), strict=True)
        ]
        for place, (name, seen) in enumerate(batch):
            alone = [[calls[place][1][k] for calls in single if place < len(calls)] for k in (0, 1)]
            if any(not isinstance(part, Tensor) or not part.ndim for part in (*seen, *alone[0], *alone[1])):
                continue
            given, made = (
                self._same(part, torch.cat(parts)) for part, parts in zip(seen, alone, strict=True)
            )
            if not given:
                return f"what stands before layer {name!r}"
            if not made:
                return f"layer {name!r}" if name else "its forward()"
        return "its forward()"

    def _calls(self, inputs: Tensor, targets: Any) -> list[tuple[str, list[Any]]]:
        """Name of each layer, its first input and its output, in the order in which they end."""
        noted: list[tuple[str, list[Any]]] = []

        def hook(name: str) -> Callable[..., None]:
            return lambda module, given, made: noted.append((name, [given[0] if given else None, made]))

        layers = [
            (name, layer) for name, layer in self.network.named_modules() if not isinstance(layer, Metric)
        ]
        handles = [layer.register_forward_hook(hook(name)) for name, layer in layers]
        try:
            self._run(inputs, targets)
        finally:
            for handle in handles:
                handle.remove()
        return noted


def squared_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss for checks, one an example; it needs no classes."""
    return ((outputs - targets) ** 2).flatten(1).sum(dim=1)


class _WithoutDropout(TorchFunctionMode):
    """Takes the chance out of dropout, wherever in a network it stands."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:  # attention
            kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **kwargs)


_DROPOUT = {value for name, value in vars(nn.functional).items() if name.rstrip("_123d").endswith("dropout")}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def made_up(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Inputs from 0 to 1, always the same."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _twin(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        twin = copy.deepcopy(network).to("cpu", dtype).train()
    except Exception as error:
        raise ValueError(
            f"network: it can't be copied ({_first_line(error)}), so that it can't be checked; keep no computed "
            "tensors in it"
        ) from None
    module: Any
    for module in twin.modules():
        if hasattr(module, "drop_prob"):  # timm's DropPath
            module.drop_prob = 0.0
        elif type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        elif isinstance(module, nn.RReLU):
            module.eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            change = torch.rand(parameter.shape, generator=generator, dtype=dtype)
            parameter.copy_(torch.where(parameter == 0, 0.05 * change, parameter * (0.8 + 0.4 * change)))
    return twin
