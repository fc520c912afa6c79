"""Canaries of noisy steps that share nothing, neither draws nor noise: each is a run of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_privknn.attacks.events import Floats, refutes_above
from pl_privknn.labelers.canaries import Evidence, SampledEvidence
from pl_privknn.privacy.accounting.tradeoff import TradeOff
from pl_privknn.privacy.mechanisms import Gaussian

# Log-likelihood ratios of so much of the stated ε say "there", by the stated noise and by half of it: in simulations
# these find most of more draws and steps, and of too little noise.
_LEVELS = 0.05, 0.2
_LARGEST = 50.0


@dataclasses.dataclass(frozen=True)
class Alone:
    """Log-likelihood ratios of canaries of their own directions, and what they are made of.

    Attributes:
        mechanism: the release of one step, as it is stated.
        lengths: of what each canary would have added to each step, float32 ``(steps, m)``.
        scores: by the stated noise, shape ``(m,)``.
        suspected: by half of it, shape ``(m,)``.
    """

    mechanism: Gaussian
    lengths: Tensor
    scores: Floats
    suspected: Floats

    @classmethod
    def of(cls, runs: Sequence[Sequence[Evidence]]) -> Alone | None:
        """Of all runs' rounds; None where their evidence is of another kind."""
        parts = [[each for each in rounds if isinstance(each, SampledEvidence)] for rounds in runs]
        if not parts or not all(parts):
            return None
        lengths = torch.cat([torch.cat([each.lengths for each in rounds]) for rounds in parts], dim=1)
        scores = torch.cat([torch.stack([each.scores() for each in rounds]).sum(dim=0) for rounds in parts])
        half = torch.cat([torch.stack([each.suspected() for each in rounds]).sum(dim=0) for rounds in parts])
        return cls(parts[0][0].mechanism, lengths, scores.numpy(), half.numpy())

    def again(self, factor: float, random: np.random.Generator) -> tuple[Alone, NDArray[np.bool_]]:
        """An attack like this one on noise that is so many times too small, and its coins."""
        count = self.lengths.shape[1]
        present = torch.from_numpy(random.random(count) < 0.5)
        evidence = SampledEvidence(count, self.mechanism)
        for length in self.lengths:
            drawn = torch.from_numpy(random.random(count) < self.mechanism.sampling_rate) & present
            noise = torch.from_numpy(random.standard_normal(count)) * (self.mechanism.sigma / factor)
            evidence.add_step(drawn * length + noise, length)
        made = Alone(self.mechanism, self.lengths, evidence.scores().numpy(), evidence.suspected().numpy())
        return made, present.numpy()

    def refutes(
        self, present: NDArray[np.bool_], epsilon: float, claim: TradeOff, *, confidence: float
    ) -> bool:
        """Whether canaries that were there are told from others more often than was stated.

        Args:
            present: the coins, shape ``(m,)``.
            epsilon: stated; says from which score on a canary is taken to be there.
            claim: what was stated.
            confidence: a true claim is refuted with probability at most 1 − confidence.
        """
        each = 1 - (1 - confidence) / len(_LEVELS)
        return any(
            refutes_above(
                scores[present], scores[~present], level * min(epsilon, _LARGEST), claim, confidence=each
            )
            for scores, level in zip((self.scores, self.suspected), _LEVELS, strict=True)
        )
