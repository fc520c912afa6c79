"""Teacher that is a linear model trained by noisy SGD once per round; its answers cost nothing more."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pl_privknn._checks import (
    check_choice,
    check_finite,
    check_int,
    check_non_negative,
    check_positive,
    check_switch,
)
from pl_privknn.config import as_group
from pl_privknn.features.public import PublicWhitening
from pl_privknn.labelers.base import (
    Capabilities,
    MakesModel,
    PayingRun,
    PrivateRecords,
    Release,
    SpendsBudget,
)
from pl_privknn.networks.layer_gradients import LayerGradients
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.privacy.mechanisms.base import Charge
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.mechanisms.steps import (
    PaidSteps,
    noise_aware_lr,
    noise_for_steps,
    step_mechanism,
)
from pl_privknn.privacy.noise import NoiseSource


@dataclasses.dataclass(frozen=True)
class LinearModel:
    """Softmax regression on whitened principal components of features.

    Args:
        components: keep this many principal directions of the queries (fewer where there are fewer queries);
            None keeps the features and only centres them.
        whitening: divide each direction by its standard deviation to this power.
        bias: let the model have one. It takes as much of the clipping norm as the features, and a larger rate than it
            bears; without it few large steps learn more.
        soft: release class probabilities too.

    Raises:
        ValueError: for an argument out of its range.
    """

    components: int | None = 200
    whitening: float = 0.5
    bias: bool = True
    soft: bool = False

    def __post_init__(self) -> None:
        if self.components is not None:
            check_int("components", self.components)
        check_non_negative("whitening", self.whitening)
        check_switch("bias", self.bias)
        check_switch("soft", self.soft)


@dataclasses.dataclass(frozen=True)
class LinearOptimization:
    """SGD with momentum on noisy gradients.

    Args:
        lr: peak learning rate.
        noise_limit: lower the rate where there is more noise than this, see
            :func:`~pl_privknn.privacy.mechanisms.steps.noise_aware_lr`; None never lowers it.
        momentum: in [0, 1).
        scheduler: ``"cosine"``, by which the rate falls to 0 along half a cosine, or ``"none"``.
        steps_per_charge: most steps paid by one row of the ledger.

    Raises:
        ValueError: for an argument out of its range.
    """

    lr: float = 32.0
    noise_limit: float | None = 0.024
    momentum: float = 0.9
    scheduler: str = "cosine"
    steps_per_charge: int = 50

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        if not 0 <= check_finite("momentum", self.momentum) < 1:
            raise ValueError(f"momentum={self.momentum!r} must lie in [0, 1)")
        check_choice("scheduler", self.scheduler, ("none", "cosine"))
        check_int("steps_per_charge", self.steps_per_charge)


class NoisySGDTeacher(MakesModel, SpendsBudget):
    """Teacher that is a softmax regression on features, trained by noisy SGD (Abadi et al. 2016).

    A round costs its training, however many queries it answers: answers are a function of released weights.
    Features are centred, rotated and scaled by what the round's queries, which are public, say of them (see
    :class:`~pl_privknn.features.public.PublicWhitening`); so ask many, best all of them. All queries of a
    round are asked together, since a second call would have to train, and pay, again.

    Steps are those of :class:`~pl_privknn.training.noisy_sgd.NoisySGD`, which trains any network. The gradient of one
    example in a softmax regression is an outer product, so its norm is known in closed form and the clipped sum is
    one matrix product.

    Args:
        sampling_rate: Poisson rate at which each record takes part in a step.
        expected_batch_size: what the noisy sum of gradients is divided by: a public constant, about ``sampling_rate``
            times the number of records. It scales the learning rate and nothing else.
        steps: noisy steps of one round.
        budget: sets the least noise with which all rounds cost at most its ε; by default the budget of the run.
        noise_multiplier: noise over ``max_grad_norm``, instead.
        max_grad_norm: L2 bound of each record's gradient.
        optimization: what noisy gradients do to the weights.
        model: the linear model and what features go through before it.
        records_per_person: most records of a drawn person in a step, drawn by private coins, where the unit is a
            person: coins are persons' then, and the mean gradient of a person's records is clipped.
        noise_source: see :class:`~pl_privknn.labelers.base.Labeler`.

    Raises:
        ValueError: for arguments out of range, or both a budget's ε and ``noise_multiplier``.

    Example:
        >>> from pl_privknn.labelers import NoisySGDTeacher
        >>> from pl_privknn.privacy import epsilon_for_delta
        >>> teacher = NoisySGDTeacher(sampling_rate=0.1, steps=50, noise_multiplier=4.0)
        >>> round(epsilon_for_delta(teacher.plan(100, 50, 10), 1e-5), 3)
        0.684
    """

    free_parameters = ("noise_multiplier",)
    _mechanism: Gaussian | None = None

    def __init__(
        self,
        sampling_rate: float = 0.1,
        expected_batch_size: int = 6000,
        steps: int = 200,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 0.25,
        optimization: LinearOptimization = LinearOptimization(),
        model: LinearModel = LinearModel(),
        records_per_person: int = 1,
        noise_source: NoiseSource | None = None,
    ) -> None:
        super().__init__(budget, noise_multiplier, noise_source)
        self.expected_batch_size = check_int("expected_batch_size", expected_batch_size)
        self.steps = check_int("steps", steps)
        self.sampling_rate, self.max_grad_norm = sampling_rate, max_grad_norm
        self.optimization = as_group("optimization", optimization, LinearOptimization())
        self.model = as_group("model", model, LinearModel())
        #: Constant input after the features: 1, or 0 where there is no bias.
        self.constant = float(self.model.bias)
        self.records_per_person = check_int("records_per_person", records_per_person)
        self._table: tuple[Tensor, Tensor, int] | None = None
        self._owners: Tensor | None = None
        self._head: dict[str, Tensor] | None = None
        self._inputs = torch.empty(0)  # of the model, for this process's records
        if noise_multiplier is not None:
            self._set_noise(noise_multiplier)
        self._begin()

    @property
    def mechanism(self) -> Gaussian:
        """Mechanism of one step, which also draws its noise.

        Raises:
            ValueError: before a budget has set its noise.
        """
        return self.set_by_budget(self._mechanism)

    def set_noise(self, budget: Budget, rounds: int) -> None:
        """Set the noise of all steps of all rounds; see the base."""
        if not self._own_noise:
            assert budget.epsilon is not None
            steps = self.steps * rounds
            self._set_noise(noise_for_steps(budget.epsilon, budget.delta, self.sampling_rate, steps))

    def _set_noise(self, noise_multiplier: float) -> None:
        self._mechanism = step_mechanism(noise_multiplier, self.max_grad_norm, self.sampling_rate)
        #: Peak learning rate after ``noise_limit``.
        self.lr = noise_aware_lr(
            self.optimization.lr,
            self.optimization.noise_limit,
            noise_multiplier,
            self.steps,
            self.expected_batch_size,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: one training per round; persons, as units of Poisson batches; shards, whose sums add up."""
        return Capabilities(in_batches=False, persons=True, shards=("add_remove",))

    def learn(self, records: PrivateRecords) -> None:
        """Take the private records; see :meth:`Labeler.learn`. Training waits for the queries."""
        self._table = (records.table(), records.labels, records.num_classes)
        self._owners = records.owners

    def plan(self, num_queries: int, max_answers: int, num_classes: int, rounds: int = 1) -> list[Charge]:
        """Charges of all steps of all rounds; see :meth:`Labeler.plan`."""
        return [Charge(self.mechanism, self.steps * rounds)]

    def answer(self, queries: Tensor, run: PayingRun, max_answers: int | None) -> Release:
        """Train, charging the steps, and answer the first ``max_answers`` queries; see :meth:`Labeler.answer`."""
        assert self._table is not None
        released = torch.full((len(queries),), -1, dtype=torch.int64)
        if len(queries) == 0:
            return Release(released)
        change = run.processes.from_first(lambda: self.whitening_of(queries))
        parts = self._table[0].split(4096)
        self._inputs = torch.cat([_with_constant(change(part), self.constant) for part in parts])
        weights = self._train(self._table[2], run)
        self._head = {"weights": weights, **change.state_dict()}
        scores = _with_constant(change(queries), self.constant).double() @ weights.T
        answered = torch.arange(len(queries))[:max_answers]
        released[answered] = scores[answered].argmax(dim=1)
        return Release(released, scores.softmax(dim=1).float() if self.model.soft else None)

    def head_state(self) -> dict[str, Tensor] | None:
        """Weights, float64 ``(c, d + 1)``, and the state of the public whitening; see the base."""
        return self._head

    def head(self, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Model of a state, independent of this labeler and its private table; see :meth:`MakesModel.head`."""
        learned, constant = dict(state), self.constant
        weights = learned.pop("weights")
        kept = None if self.model.components is None else learned["directions"].shape[1]
        change = PublicWhitening(len(learned["mean"]), kept, self.model.whitening)
        change.load_state_dict(learned)

        def predict(features: Tensor) -> Tensor:
            return (_with_constant(change(features), constant).double() @ weights.T).softmax(dim=1)

        return predict

    def whitening_of(self, queries: Tensor) -> PublicWhitening:
        """Transformation of features, learned from the queries of a round, float32 ``(m, d)``."""
        kept = self.model.components
        kept = None if kept is None else min(kept, queries.shape[1], len(queries))
        return PublicWhitening(queries.shape[1], kept, self.model.whitening).fit(queries)

    def _train(self, num_classes: int, run: PayingRun) -> Tensor:
        """Train with noisy steps; returns the released weights, float64 ``(num_classes, d + 1)``, the bias last."""
        assert self._table is not None
        most, owners, several = self.optimization.steps_per_charge, self._owners, self.records_per_person
        steps = PaidSteps(run.ledger, self.mechanism, self.steps, most, run.unit, run.processes)
        weights = torch.zeros(num_classes, self._inputs.shape[1], dtype=torch.float64)
        velocity = torch.zeros_like(weights)
        for left in range(self.steps, 0, -1):
            drawn = steps.sample(len(self._inputs), self.sampling_rate, run.noise, owners, several)
            persons = None if owners is None or several == 1 else owners[drawn]
            total = clipped_softmax_gradients(
                weights, self._inputs[drawn], self._table[1][drawn], self.max_grad_norm, persons
            )
            noisy = steps.release(total, run.noise).view_as(weights)
            share = 1 - left / self.steps if self.optimization.scheduler == "cosine" else 0.0
            velocity = self.optimization.momentum * velocity + noisy / self.expected_batch_size
            weights = weights - self.lr * 0.5 * (1 + math.cos(math.pi * share)) * velocity
        return weights


# Records, or persons, whose gradients are added at once.
_TOGETHER = 8192


def clipped_softmax_gradients(
    weights: Tensor,
    inputs: Tensor,
    labels: Tensor,
    max_grad_norm: float,
    persons: Tensor | None = None,
) -> Tensor:
    """Sum of the clipped per-example gradients of the cross-entropy of a softmax regression.

    Args:
        weights: ``(c, d)``.
        inputs: float32 ``(b, d)``; ``b`` may be 0.
        labels: int64 ``(b,)``.
        max_grad_norm: L2 bound of each example's gradient.
        persons: of each example, int64 ``(b,)``, person by person: the mean of a person's gradients is clipped.

    Returns:
        float64 ``(c · d,)``, 0 for an example whose gradient is not finite.
    """
    model = nn.utils.skip_init(nn.Linear, weights.shape[1], weights.shape[0], bias=False)
    model.weight = nn.Parameter(weights.to(inputs))
    layers = LayerGradients(model, [model.weight])
    total = ClippedSum([weights.numel()], max_grad_norm, inputs.device)
    counts = None if persons is None else persons.unique_consecutive(return_counts=True)[1]
    few = _TOGETHER if counts is None else [int(some.sum()) for some in counts.split(_TOGETHER)]
    own = labels if persons is None else persons
    for x, y, who in zip(inputs.split(few), labels.split(few), own.split(few), strict=True):
        layers.add(total, x, y, None if persons is None else who)
    return total.finish()


def _with_constant(vectors: Tensor, constant: float) -> Tensor:
    return torch.cat([vectors, vectors.new_full((len(vectors), 1), constant)], dim=1)
