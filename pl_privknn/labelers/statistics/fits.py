"""Linear models from noisy moments of private records and from public examples: post-processing, free of cost."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_privknn.labelers.statistics.targets import TARGETS, Targets

_MOST_STEPS = 300


def fit_least_squares(public: Tensor, moment: Tensor, ridge: float) -> Tensor:
    """W that minimises E[|Wx − y|²]/2 + ridge/2·|W|², with E[x xᵀ] from public examples and E[y xᵀ] given.

    With noise on the moment alone, the public second moment stays exact, which is worth most where there is much
    noise (Mehta et al. 2022).

    Args:
        public: x of public examples, float64 ``(m, p)``.
        moment: E[y xᵀ], float64 ``(c, p)``, noisy.
        ridge: above 0.

    Returns:
        float64 ``(c, p)``.
    """
    second = public.T @ public / len(public)
    second.diagonal().add_(ridge)
    return torch.linalg.solve(second, moment.T).T.contiguous()


def fit_maximum_likelihood(
    public: Tensor,
    moment: Tensor,
    ridge: float,
    start: Tensor | None = None,
    targets: Targets = TARGETS["multiclass"],
) -> Tensor:
    """W that minimises E[log Σ exp(Wx)] − ⟨W, moment⟩ + ridge/2·|W|², the first mean over public examples.

    That is a softmax regression in which labels enter by their moment alone, since the log-likelihood is
    ⟨W, y xᵀ⟩ − log Σ exp(Wx); of attributes, for each a logistic regression. Strictly convex; by L-BFGS.

    Args:
        public: x of public examples, float64 ``(m, p)``.
        moment: E[y xᵀ], float64 ``(c, p)``, noisy.
        ridge: above 0.
        start: where to begin.
        targets: of classes, or of attributes.

    Returns:
        float64 ``(c, p)``.
    """
    from scipy.optimize import minimize

    def value_and_slope(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.from_numpy(flat).view_as(moment)
        scores = public @ weights.T
        slope = targets.expected(scores).T @ public / len(public) - moment + ridge * weights
        value = (
            targets.log_partition(scores).mean()
            - (weights * moment).sum()
            + ridge / 2 * weights.square().sum()
        )
        return float(value), slope.flatten().numpy()

    first = torch.zeros_like(moment) if start is None else start
    found = minimize(
        value_and_slope,
        first.flatten().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _MOST_STEPS, "ftol": 1e-12, "gtol": 1e-7},
    )
    return torch.from_numpy(found.x).view_as(moment).clone()
