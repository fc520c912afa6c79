"""Accuracy on the private records, in the place of a training accuracy that nobody has paid for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from pl_privknn._checks import check_int, check_positive, check_rate
from pl_privknn.privacy.mechanisms import Charge, DiscreteGaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.noisy_steps import poisson_sample
from pl_privknn.training.network_checks import EXAMPLES, made_up

_RECORDS_AT_ONCE = 512


@dataclasses.dataclass(frozen=True)
class PaidAccuracy:
    """Noisy counts of right and of wrong predictions on a fresh Poisson sample, every so many steps.

    A record is in one of the two counts and moves it by 1, so their L2 sensitivity is 1, and how many records there
    are stays private. Their charges are planned beside those of the steps, and ``epsilon`` covers both.

    Args:
        every_n_steps: steps between two releases.
        noise: parameter σ of the discrete Gaussian noise on each count. The accuracy's error is about σ over the
            number of records counted.
        sampling_rate: probability with which a record is counted.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> from pl_privknn.training import PaidAccuracy
        >>> accuracy = PaidAccuracy(every_n_steps=100, noise=200.0)
        >>> round(epsilon_for_delta(accuracy.charges(2360), delta=1e-5), 3)
        0.072
    """

    every_n_steps: int = 100
    noise: float = 100.0
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        check_int("every_n_steps", self.every_n_steps)
        check_positive("noise", self.noise)
        check_rate("sampling_rate", self.sampling_rate)
        _ = self.mechanism

    @property
    def mechanism(self) -> DiscreteGaussian:
        """The release of two counts."""
        return DiscreteGaussian(self.noise, 1.0, self.sampling_rate)

    def releases(self, steps: int) -> int:
        """How many there are in a training of so many steps."""
        return steps // self.every_n_steps

    def charges(self, steps: int) -> list[Charge]:
        """What they cost."""
        count = self.releases(steps)
        return [Charge(self.mechanism, count)] if count else []


def right_and_wrong(
    module: pl.LightningModule,
    records: Any,
    sampling_rate: float,
    coins: NoiseSource,
    moved: Callable[[Any], Any],
) -> Tensor:
    """Counts of right and wrong predictions on a Poisson sample, private; int64 ``(2,)`` on the module's device.

    Args:
        module: ``forward`` gives logits ``(b, num_classes)``.
        records: this process's private records.
        sampling_rate: of the sample.
        coins: of the sample.
        moved: takes a batch to the module's device, by its transfer hooks.
    """
    drawn = poisson_sample(len(records), sampling_rate, coins)
    counts = torch.zeros(2, dtype=torch.int64, device=module.device)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for part in drawn.split(_RECORDS_AT_ONCE) if len(drawn) else ():
                x, y = moved(records[part.tolist()])
                right = (module(x).argmax(dim=1) == y).sum()
                counts += torch.stack([right, len(y) - right])
    finally:
        module.train(was_training)
    return counts


def accuracy_of(counts: Tensor) -> float:
    """Accuracy by two noisy counts; 0 to 1, and 0 where the noise leaves nothing."""
    right, wrong = (max(0, int(count)) for count in counts)
    return right / (right + wrong) if right + wrong else 0.0


def check_predictions(module: pl.LightningModule, data: Any) -> None:
    """Raise ``ValueError`` unless ``forward`` gives every made-up example logits of its own.

    Args:
        module: in its trainer.
        data: the data module.
    """
    if data.task != "multiclass":
        raise ValueError(f"accuracy: task={data.task!r} has no single right class; leave it out")
    twin: Any = copy.deepcopy(module).to("cpu", torch.float64).eval()
    twin._trainer = module._trainer
    inputs = made_up((EXAMPLES, *data.image_shape), torch.float64)

    def logits(x: Tensor) -> Tensor:
        batch = twin.on_before_batch_transfer((x, torch.zeros(len(x), dtype=torch.int64)), 0)
        made: Tensor = twin(twin.on_after_batch_transfer(batch, 0)[0])
        return made

    check_rows(logits, inputs, data.num_classes, f"accuracy: forward() of {type(module).__name__}")


def check_rows(logits: Callable[[Tensor], Tensor], inputs: Tensor, num_classes: int, who: str) -> None:
    """Raise ``ValueError`` unless every made-up example has logits of its own.

    Args:
        logits: in evaluation.
        inputs: of the examples, in double precision.
        num_classes: of the data.
        who: gives them, for messages.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        together = logits(inputs)
        if not isinstance(together, Tensor) or together.shape != (len(inputs), num_classes):
            raise ValueError(
                f"{who} gives no logits of shape (b, {num_classes}), of which a prediction could be taken; leave the "
                "accuracy out, or let it give them"
            )
        alone = torch.cat([logits(x) for x in inputs.split(1)])
    if not torch.allclose(together, alone, rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"{who} in evaluation mixes the examples of a batch, so that one record could change many predictions; "
            "let each example be computed by itself"
        )
