"""Scales of a released model's scores that make its probabilities as certain as they are right.

All of it is post-processing: of noisy sums, the known size of their noise, and public examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pl_privknn.labelers.released_sums import Targets

# Logarithms of the largest factors of scores, either way: of a model that maximises likelihood, and of others.
_NEAR, _FAR = 1.5, 10.0
_DRAWS, _SIMULATED = 2, 4000
# Directions in which features of a class spread alike, without public examples that show how they do: 40 is between
# what digits (80 to 160) and clothes (20 to 40) need by HOG.
_DIRECTIONS = 40


def likeliest_scale(scores: Tensor, of_truth: float, targets: Targets, most_log: float) -> float:
    """Factor β of scores that maximises the mean log-likelihood β E⟨s, y⟩ − E[log Σ exp(β s)].

    Args:
        scores: s of examples, float64 ``(m, c)``.
        of_truth: E⟨s, y⟩ of the private records, by released sums.
        targets: of classes, or of attributes.
        most_log: largest |log β|.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_scale: float) -> float:
        scale = math.exp(log_scale)
        return float(targets.log_partition(scale * scores).mean()) - scale * of_truth

    return math.exp(minimize_scalar(loss, bounds=(-most_log, most_log), method="bounded").x)


def confident_weights(
    public: Tensor, moment: Tensor, deviation: float, fit: Callable[[Tensor], Tensor], targets: Targets
) -> Tensor:
    """Weights of a fit, scaled by :func:`likeliest_scale`, float64 ``(c, p)``.

    The mean score of the true label is ⟨W, E[y xᵀ]⟩. The moment at hand is noisy, and W was fitted to its noise,
    which adds E⟨W, noise⟩ = σ² tr(∂W/∂M); fits to moments with further noise of the same size tell it.

    Args:
        public: x of public examples, float64 ``(m, p)``.
        moment: M, the noisy E[y xᵀ], float64 ``(c, p)``.
        deviation: σ, standard deviation of its noise.
        fit: weights from a moment.
        targets: of classes, or of attributes.
    """
    weights, generator, optimism = fit(moment), torch.Generator().manual_seed(0), 0.0
    for _ in range(_DRAWS):
        noise = deviation * torch.randn(moment.shape, generator=generator, dtype=moment.dtype)
        optimism += float(((fit(moment + noise) - weights) * noise).sum()) / _DRAWS
    of_truth = float((weights * moment).sum()) - optimism
    return weights * likeliest_scale(public @ weights.T, of_truth, targets, _NEAR)


def scale_without_public(
    weights: Tensor, moment: Tensor, deviation: float, bias: float, response: float, targets: Targets
) -> float:
    """Scale of a linear model's scores where there are no public examples: by simulated ones.

    Means and shares of classes are those of the noisy moment. Since features have length 1, what their mean lacks of
    that is the spread of a class, taken as equal in :data:`_DIRECTIONS` directions.

    Args:
        weights: float64 ``(c, p)``, linear in the moment.
        moment: noisy E[y xᵀ], float64 ``(c, p)``, whose last column is ``bias`` times the shares of classes.
        deviation: standard deviation of its noise.
        bias: above 0.
        response: tr(∂w/∂m) of one class's weights by its moment.
        targets: of classes.
    """
    shares = (moment[:, -1] / bias).clamp(min=1e-3)
    means = moment / shares[:, None]
    scores = (weights @ means.T - torch.diag(deviation**2 * response / shares)).T
    noise = (moment.shape[1] - 1) * deviation**2
    spread = 1 - ((moment[:, :-1].square().sum(dim=1) - noise) / shares**2).clamp(0, 1)
    generator = torch.Generator().manual_seed(0)
    truth = torch.multinomial(shares, _SIMULATED, replacement=True, generator=generator)
    values, directions = torch.linalg.eigh(weights[:, :-1] @ weights[:, :-1].T)
    draws = torch.randn(_SIMULATED, len(weights), generator=generator, dtype=weights.dtype)
    around = (draws * values.clamp(min=0).sqrt()) @ directions.T
    simulated = scores[truth] + around * (spread[truth, None] / _DIRECTIONS).sqrt()
    of_truth = float(simulated[torch.arange(_SIMULATED), truth].mean())
    return likeliest_scale(simulated, of_truth, targets, _FAR)
