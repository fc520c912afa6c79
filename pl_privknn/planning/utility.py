"""What noise leaves of the votes: does a query pass the screening, and is it answered rightly?

ε says nothing of that, so a plan may keep any ε and be useless. Votes of an assumed query go through the very
mechanisms that would draw, many times, with noise from a fixed seed; nothing private is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pl_privknn.labelers import FixedThresholds, Screening
from pl_privknn.labelers.attributes import agreement
from pl_privknn.privacy.mechanisms import Gaussian, Laplace, VoteNoise
from pl_privknn.privacy.noise import SeededNoise

#: Shares of the votes that the right class has, for which plans state what becomes of a query.
SHARES = (0.9, 0.75, 0.6, 0.5)
#: Leads in votes, where the number of votes is not known beforehand.
LEADS = (50, 20, 10, 5)
# Draws for each of them: the standard error of a probability is at most 0.005.
_DRAWS = 10_000
_CLEAR, _TORN = SHARES[0], SHARES[-1]
_RIGHT, _TOLD_APART = 0.9, 0.25


@dataclasses.dataclass(frozen=True)
class Utility:
    """What becomes of a query.

    Attributes:
        share: share of the votes that the right class has; None where only its lead is known.
        lead: votes by which it leads; all other votes are for one rival.
        passes: probability that the query passes the screening.
        right: probability that an answer is right.
        of: what is answered, ``"queries"`` or each of their ``"attributes"``.
    """

    share: float | None
    lead: int
    passes: float
    right: float
    of: str = "queries"

    def __str__(self) -> str:
        of = f"{self.lead} votes ahead" if self.share is None else f"vote share {self.share:g}"
        of = f"an attribute, {of}" if self.of == "attributes" else of
        passed = "" if self.passes == 1 else f"passes {100 * self.passes:.0f} %, "
        return f"{of}: {passed}answered rightly {100 * self.right:.0f} %"


def utility_of_votes(
    noise: VoteNoise, num_classes: int, votes: int | None, screening: Screening | None = None
) -> tuple[Utility, ...]:
    """What becomes of queries on which the neighbours agree more or less.

    Args:
        noise: of the answers.
        num_classes: number of classes.
        votes: cast on a query; None where that is unknown, as for a teacher whose records choose their queries.
        screening: before the answers, if any.
    """
    if votes is None:
        cases: list[tuple[float | None, int, int]] = [(None, lead, 0) for lead in LEADS]
    else:
        cases = [(share, round(share * votes), votes - round(share * votes)) for share in SHARES]
    table = torch.zeros(len(cases), num_classes, dtype=torch.int64)
    table[:, 0] = torch.tensor([right for _, right, _ in cases])
    table[:, 1] = torch.tensor([rival for _, _, rival in cases])
    passes, right = chances(noise, table, torch.zeros(len(cases), dtype=torch.int64), screening)
    return tuple(
        Utility(share, ahead - rival, round(float(passed), 3), round(float(sure), 3))
        for (share, ahead, rival), passed, sure in zip(cases, passes, right, strict=True)
    )


def utility_of_attributes(
    noise: Gaussian | Laplace,
    votes: int | None,
    tau: float | None,
    expected_positives: float | None = None,
    abstain: float = 0.0,
) -> tuple[Utility, ...]:
    """What becomes of one attribute of a query, by the public threshold; what a rule learns may help further.

    Stated for one that the voters have. One that they have not is answered rightly as often, or, where the number of
    votes is noisy, more often.

    Args:
        noise: of each sum of clipped votes.
        votes: cast on a query; None where noise of the same kind hides their number too, as in reverse kNN.
        tau: τ of the clipping, or None.
        expected_positives: attributes that a voter is assumed to have; None: at most τ, so that nothing is cut.
        abstain: where the number of votes is noisy: deviations of the noise below which a query is refused.
    """
    cases: list[tuple[float | None, int, int]] = [(None, lead, lead) for lead in LEADS]
    if votes is not None:
        cases = [(share, round(share * votes), votes) for share in SHARES]
    rule, source = FixedThresholds(expected_positives=expected_positives), SeededNoise(0)
    agreed = torch.as_tensor(agreement(1.0, tau, expected_positives), dtype=torch.float64)
    found = []
    for share, having, cast in cases:
        noisy = noise.add_noise((agreed * having).expand(_DRAWS, 1), source)
        total = torch.full((_DRAWS,), float(cast), dtype=torch.float64)
        passed = torch.ones(_DRAWS, dtype=torch.bool)
        if votes is None:
            total = noise.add_noise(total, source)
            passed = total >= abstain * noise.deviation
        given = rule(noisy, total.clamp(min=0), tau, noise.deviation)[:, 0] > 0.5
        passes, right = float(passed.double().mean()), float(given[passed].double().mean())
        found.append(Utility(share, 2 * having - cast, round(passes, 3), round(right, 3), "attributes"))
    return tuple(found)


def chances(
    noise: VoteNoise, votes: Tensor, truth: Tensor, screening: Screening | None = None, draws: int = _DRAWS
) -> tuple[Tensor, Tensor]:
    """The chances that queries pass, and that answers are right, by drawing.

    Args:
        noise: of the answers.
        votes: int64 ``(m, c)``.
        truth: right class of each query, int64 ``(m,)``.
        screening: before the answers, if any.
        draws: of the noise, for each query.

    Returns:
        Two tensors, float ``(m,)``.
    """
    source = SeededNoise(0)
    many = votes.expand(draws, *votes.shape)
    right = (noise.argmax(many, source) == truth).double().mean(0)
    if screening is None:
        return torch.ones(len(votes), dtype=torch.float64), right
    # The comparison alone: its cost is the labeler's matter.
    largest = many.max(-1).values.double()
    passed = largest + source.normal(tuple(largest.shape), screening.sigma) >= screening.threshold
    return passed.double().mean(0), right


def hopeless(found: Sequence[Utility]) -> list[str]:
    """Warnings where an ε is kept by noise that drowns the votes."""
    by_share = {item.share: item for item in found}
    warnings = []
    best = found[0] if found else None
    if best is not None and best.right < _RIGHT:
        clear = (
            f"with {best.lead} votes ahead"
            if best.share is None
            else f"on which {100 * best.share:.0f} % agree"
        )
        warnings.append(
            f"hopeless: of {best.of} {clear}, {100 * best.right:.0f} % would be answered rightly. Ask fewer "
            "queries, let more records vote, sample at a lower rate, or allow a larger ε"
        )
    if (
        _CLEAR in by_share
        and by_share[_CLEAR].passes - by_share[_TORN].passes < _TOLD_APART
        and any(item.passes < 1 for item in found)
    ):
        clear_passes, torn_passes = by_share[_CLEAR].passes, by_share[_TORN].passes
        warnings.append(
            f"the screening hardly tells agreement from discord: {100 * clear_passes:.0f} % pass where 90 % agree, "
            f"and {100 * torn_passes:.0f} % where half do. Leave it out (--no-screening) or let more records vote"
        )
    return warnings
