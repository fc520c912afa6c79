"""Figures by class on held-out private records, released at the ε of the training by parallel composition.

A secret coin decides for each record, or each person, whether it is trained on or held out. A record is in one part
alone, so that two releases of which each costs ε, one of the training part and one of the hold-out, cost every record
ε (parallel composition). The hold-out's release is its noisy confusion matrix with margins, in a separate ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import InputError, check_open_unit
from pl_privknn.privacy.accounting.calibration import Parameter, calibrate
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import HOLDOUT_LEDGER, MOST_ERROR, private_folder, write_durably
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms.base import Charge, Guarantee, noise_guarantee
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_state import PrivateStore, same_table
from pl_privknn.privacy.records import persons_of

#: Files of a run's folder.
RESULT = "holdout.json"
_FILE, _KEY_BYTES = "holdout.private", 32
# Error that a recommended number of records gives.
_GOOD_ERROR = 0.1


@dataclasses.dataclass(frozen=True)
class PaidEvaluation:
    """Hold-out of a share of the private records, whose noisy confusion matrix is released at their ε.

    Attributes:
        share: of records, or of persons, that are held out, in (0, 1); a public constant.

    Raises:
        ValueError: for a share out of range.

    Example:
        >>> from pl_privknn import PaidEvaluation
        >>> PaidEvaluation(share=0.2)
        PaidEvaluation(share=0.2)
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        check_open_unit("share", self.share)


def held_out(
    evaluation: PaidEvaluation | None,
    run_dir: Path,
    run_id: str,
    numbers: Tensor,
    begun: bool,
    records: Callable[[], Iterable[Sequence[Tensor]]] | None = None,
) -> Tensor | None:
    """Draw the hold-out of a run, or read it where the run is resumed.

    Args:
        evaluation: what is asked for now; it must be what the run began with, since a record that changes its part
            would pay for both.
        run_dir: the run's folder; the secret key is in the private one next to it.
        run_id: the run.
        numbers: of records, or of the persons that they belong to, int64 ``(n,)``.
        begun: whether something was paid for.
        records: gives the records in their order, in blocks of tensors; None for records that can't be compared,
            whose run can't be resumed, since in another order a record would change its part.

    Returns:
        Bool ``(n,)``, True for those that are held out; None where nothing is. **Private**.

    Raises:
        ValueError: if the run began with another share, with none, or with other records.
    """
    path = private_folder(run_dir) / run_id / _FILE
    if evaluation is None and not path.is_file():
        return None
    share = None if evaluation is None else evaluation.share
    with contextlib.closing(PrivateStore(path, one_place=False)) as store:
        noted = store.fact("holdout")
        if noted is None and share is None:
            return None
        if noted is None and not begun:
            noted = {"share": share, "key": secrets.token_hex(_KEY_BYTES)}
            store.note("holdout", noted)
        if noted is None or noted["share"] != share:
            raise InputError(
                f"evaluate: the run in {run_dir} began with {'no hold-out' if noted is None else 'another one'}, and "
                "a record that is trained on and held out would pay for both; resume it as it began, or start a new "
                "run in another folder"
            )
        if records is None:
            known = not begun
        else:
            parts = (part for block in records() for part in block)
            known = same_table(store, "table", itertools.chain([numbers], parts), begun)
    if not known:
        raise InputError(
            "evaluate: private records are not known to be those of the run's beginning, in their order, and a "
            "record that changes its part would pay for both; go back to them (a data set that code of others reads "
            "can't be compared), or start a new run in another folder, which is charged again"
        )
    key = bytes.fromhex(noted["key"])
    limit = int(noted["share"] * 2**64)

    def held(number: int) -> bool:
        coin = hashlib.blake2b(number.to_bytes(8, "little", signed=True), key=key, digest_size=8).digest()
        return int.from_bytes(coin, "little") < limit

    different, places = numbers.unique(return_inverse=True)
    return torch.tensor([held(number) for number in different.tolist()], dtype=torch.bool)[places]


def counts_of(outcomes: Tensor, num_classes: int | None, owners: Tensor | None = None) -> Tensor:
    """**Private.** Counts of the hold-out: of right and wrong, by class, and the confusion matrix.

    Three levels: (right, wrong); (right, wrong) of each class; the confusion matrix, row by row. A sum of its noisy
    cells would have more noise than a separate count: over all cells of c classes, c times the noise of one. With two
    classes the second level is the matrix, and the only one; attributes have the first one alone.

    A record is in at most one cell of each level, with weight 1; attributes share it between right and wrong. A
    person's records share a weight of 1 among their cells. The counts of a record or person are therefore, on each
    level, a point of the simplex, or 0: it is no longer than 1, and two of them are at most √2 apart. On L levels the
    L2 sensitivity is √L under ``add_remove`` and √(2L) under ``replace_one`` (a replaced record keeps its part), for
    records and persons alike: see :func:`sensitivity`.

    Args:
        outcomes: int64 ``(n, 2)``, class and predicted class of each record, -1 where there is none (a record without
            a class is not counted, one without a prediction is wrong); of attributes the share of right ones, float
            ``(n,)``.
        num_classes: c; None for attributes.
        owners: person of each record, int64 ``(n,)``, where the unit is a person.

    Returns:
        int64 for records, float64 for persons and attributes, of length 2, 4 or 2 + 2c + c².
    """
    weights = torch.ones(len(outcomes), dtype=torch.int64)
    if owners is not None:
        places, _ = persons_of(owners)
        weights = 1 / places.bincount()[places].double()
    if num_classes is None:
        return torch.stack([(weights * share).sum() for share in (outcomes.double(), 1 - outcomes.double())])
    truth, predicted = outcomes.unbind(dim=1)
    known = (truth >= 0) & (truth < num_classes)
    wrong = (truth != predicted).long()
    in_matrix = known & (predicted >= 0) & (predicted < num_classes)
    levels = [(2 * truth + wrong, known, 2 * num_classes)]
    if num_classes > 2:
        matrix = num_classes * truth + predicted, in_matrix, num_classes**2
        levels = [(wrong, known, 2), *levels, matrix]
    counts = [torch.zeros(size, dtype=weights.dtype) for _, _, size in levels]
    return torch.cat(
        [
            count.index_add_(0, cells[rows], weights[rows])
            for count, (cells, rows, _) in zip(counts, levels, strict=True)
        ]
    )


def sensitivity(num_classes: int | None, adjacency: str) -> float:
    """L2 sensitivity of :func:`counts_of`: √L for L levels, √(2L) under ``replace_one``."""
    levels = 1 if num_classes is None or num_classes == 2 else 3
    return math.sqrt(levels * (2 if adjacency == "replace_one" else 1))


def calibrated(num_classes: int | None, budget: Budget, before: Sequence[Charge] = ()) -> Gaussian:
    """The noise of a hold-out's counts at the budget's ε, together with what its records paid for before."""
    size = sensitivity(num_classes, budget.adjacency)
    assert budget.epsilon is not None
    sigma = calibrate(
        lambda sigma: [*before, Charge(Gaussian(sigma, size))],
        Parameter("sigma", start=4.0, low=1e-2, high=1e7, rising=False),
        epsilon=budget.epsilon,
        delta=budget.delta,
        exact=False,
    ).value
    return Gaussian(sigma, size, 1.0)


def _share(right: float, wrong: float, sigma: float) -> tuple[float, float]:
    """Share of right ones among noisy counts, and its standard error, of the noise and of the sample."""
    count = max(right + wrong, 1.0)
    share = min(max(right / count, 0.0), 1.0)
    spread = (share * count + 1) / (count + 2)  # never 0 for a sample
    noise = sigma**2 * ((1 - share) ** 2 + share**2) / count**2
    return share, math.sqrt(noise + spread * (1 - spread) / count)


def error_of(num_classes: int | None, sigma: float, records: float) -> float:
    """Largest standard error of the accuracy on a number of held-out records, or persons."""
    noise = sigma**2 * (2 if num_classes == 2 else 1)
    return math.sqrt(noise / records**2 + 0.25 / records)


def records_for(num_classes: int | None, sigma: float, error: float = _GOOD_ERROR) -> int:
    """Held-out records, or persons, from which the standard error of the accuracy is at most ``error``."""
    noise = sigma**2 * (2 if num_classes == 2 else 1)
    return math.ceil((0.25 + math.sqrt(0.0625 + 4 * error**2 * noise)) / (2 * error**2))


def figures_of(noisy: Tensor, sigma: float, classes: Sequence[str] | None) -> dict[str, Any]:
    """Accuracy, balanced accuracy, recall and baseline, by post-processing.

    Args:
        noisy: :func:`counts_of` with noise of standard deviation ``sigma``.
        sigma: see there.
        classes: names of the classes; None for attributes.

    Returns:
        ``holdout_accuracy`` and ``holdout_deviation``, its standard error; above an error of ± 0.25
        ``holdout_needed``, the number of held-out records or persons for ± 0.1. Of classes also
        ``holdout_balanced_accuracy``, ``holdout_recall`` by name, their errors (``…_deviation``),
        ``holdout_baseline``, the share of the largest class, and ``holdout_confusion``, a row for each class.
    """
    values, size = noisy.double(), 0 if classes is None else len(classes)
    if size == 2:
        by_class = values.view(2, 2)
        (right, wrong), error_of_one = by_class.sum(dim=0).tolist(), sigma * math.sqrt(2)
        matrix = torch.stack([by_class[0], by_class[1].flip(0)])
    else:
        (right, wrong), error_of_one = values[:2].tolist(), sigma
        by_class, matrix = values[2 : 2 + 2 * size].view(size, 2), values[2 + 2 * size :].view(size, size)
    accuracy, error = _share(right, wrong, error_of_one)
    found: dict[str, Any] = {"holdout_accuracy": round(accuracy, 4), "holdout_deviation": round(error, 4)}
    if error > MOST_ERROR:
        found["holdout_needed"] = records_for(size, sigma)
    if classes is None:
        return found
    recalls = [_share(right, wrong, sigma) for right, wrong in by_class.tolist()]
    largest = float(by_class.sum(dim=1).max()) / max(right + wrong, 1.0)
    return found | {
        "holdout_baseline": round(min(max(largest, 0.0), 1.0), 4),
        "holdout_balanced_accuracy": round(sum(share for share, _ in recalls) / size, 4),
        "holdout_balanced_deviation": round(math.hypot(*(error for _, error in recalls)) / size, 4),
        "holdout_recall": {name: round(share, 4) for name, (share, _) in zip(classes, recalls, strict=True)},
        "holdout_recall_deviation": {
            name: round(error, 4) for name, (_, error) in zip(classes, recalls, strict=True)
        },
        "holdout_confusion": [[round(cell, 1) for cell in row] for row in matrix.tolist()],
    }


def release_figures(
    run_dir: Path,
    run_id: str,
    outcomes: Tensor,
    owners: Tensor | None,
    *,
    classes: Sequence[str] | None,
    budget: Budget,
    noise: NoiseSource,
    conditions: tuple[str, ...] = (),
    before: Sequence[Charge] = (),
) -> dict[str, Any]:
    """Release the figures of the hold-out, once per run: a second call returns what the first one released.

    Args:
        run_dir: the run's folder.
        run_id: the run.
        outcomes: see :func:`counts_of`. **Private**.
        owners: person of each, where the unit is a person, whose records are averaged.
        classes: names of the classes, public; None for attributes.
        budget: of the training, ε included: the release costs as much.
        noise: source of the noise.
        conditions: under which a record moves its own outcome alone.
        before: releases of all records, held out or not, which the run has charged.

    Returns:
        :func:`figures_of`, and ``holdout_epsilon``, the ε that they cost. The confusion matrix is in the file alone.

    Raises:
        BudgetExceeded: if the release was paid for and its result is lost.
    """
    path = run_dir / RESULT
    if not path.exists():
        size = None if classes is None else len(classes)
        counts, mechanism = counts_of(outcomes, size, owners), calibrated(size, budget, before)
        guarantee = noise_guarantee(noise)
        guarantee = guarantee & Guarantee("conditional", conditions) if conditions else guarantee
        ledger = Ledger(run_dir / HOLDOUT_LEDGER, budget)
        with contextlib.closing(ledger):
            run = ledger.run(
                run_id,
                [charge.with_guarantee(guarantee) for charge in (*before, Charge(mechanism))],
                {"release": "confusion matrix of the hold-out"},
            )
            for of in (*(charge.mechanism for charge in before), mechanism):
                row = run.charge(of, 1, noise=noise, adjacencies=(budget.adjacency,), unit=budget.unit)
            noisy = mechanism.add_noise(counts, noise.stream("holdout", row))
            result = {
                **figures_of(noisy, mechanism.sigma, classes),
                "holdout_epsilon": ledger.report().epsilon,
            }
        write_durably(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return kept_figures(run_dir)


def kept_figures(run_dir: Path) -> dict[str, Any]:
    """Figures that a run has released, without the confusion matrix; empty before."""
    path = run_dir / RESULT
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found.pop("holdout_confusion", None)
    return found
