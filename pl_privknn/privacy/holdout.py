"""Accuracy on held-out private records, released at the ε of the training by parallel composition.

A secret coin decides for each record, or each person, whether it is trained on or held out. A record is in one part
alone, so that two releases of which each costs ε, one of the training part and one of the hold-out, cost every record
ε (parallel composition). The hold-out's release is noisy counts of hits and of records, in a separate ledger.
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
from pl_privknn.privacy.files import HOLDOUT_LEDGER, private_folder, write_durably
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms.base import Charge, Guarantee, noise_guarantee
from pl_privknn.privacy.mechanisms.noisy_votes import Gaussian
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.private_state import PrivateStore, same_table
from pl_privknn.privacy.records import persons_of

#: Files of a run's folder.
RESULT = "holdout.json"
_FILE, _KEY_BYTES = "holdout.private", 32
#: A record adds one to the number of records and at most one to the hits.
_L2 = math.sqrt(2.0)


@dataclasses.dataclass(frozen=True)
class PaidEvaluation:
    """Hold-out of a share of the private records, whose noisy accuracy is released at the ε of the training.

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
    """Draw the hold-out of a run, the same whenever it is resumed.

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


def release_accuracy(
    run_dir: Path,
    run_id: str,
    hits: Tensor,
    owners: Tensor | None,
    *,
    budget: Budget,
    noise: NoiseSource,
    conditions: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Release the accuracy on the hold-out, once per run: a second call returns what the first one released.

    Args:
        run_dir: the run's folder.
        run_id: the run.
        hits: whether each held-out record is predicted right, bool ``(n,)``, or the share of its attributes that
            are, float in 0 … 1. **Private**.
        owners: person of each, where the unit is a person: a person's hits are averaged.
        budget: of the training, ε included: the release costs as much.
        noise: source of the noise.
        conditions: under which a record moves its own hit alone.

    Returns:
        ``holdout_accuracy``, its standard deviation by the noise, and the ε that it cost.

    Raises:
        BudgetExceeded: if the release was paid for and its result is lost.
    """
    path = run_dir / RESULT
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    values = hits.double() if hits.is_floating_point() else hits.long()
    assert budget.epsilon is not None
    counts = torch.stack([values.sum(), torch.tensor(len(values), dtype=values.dtype)])
    if owners is not None:
        places, persons = persons_of(owners)
        sums, sizes = (torch.zeros(len(persons), dtype=torch.float64) for _ in range(2))
        sums.index_add_(0, places, values.double())
        sizes.index_add_(0, places, torch.ones(len(values), dtype=torch.float64))
        counts = torch.stack([(sums / sizes.clamp(min=1)).sum(), torch.tensor(float(len(persons)))])
    sigma = calibrate(
        lambda sigma: [Charge(Gaussian(sigma, _L2))],
        Parameter("sigma", start=4.0, low=1e-2, high=1e7, rising=False),
        epsilon=budget.epsilon,
        delta=budget.delta,
        exact=False,
    ).value
    mechanism = Gaussian(sigma, _L2, 1.0)
    guarantee = noise_guarantee(noise)
    guarantee = guarantee & Guarantee("conditional", conditions) if conditions else guarantee
    ledger = Ledger(run_dir / HOLDOUT_LEDGER, budget)
    with contextlib.closing(ledger):
        run = ledger.run(
            run_id, [Charge(mechanism).with_guarantee(guarantee)], {"release": "accuracy of the hold-out"}
        )
        row = run.charge(mechanism, 1, noise=noise, adjacencies=(budget.adjacency,), unit=budget.unit)
        right, size = mechanism.add_noise(counts, noise.stream("holdout", row)).tolist()
        size = max(size, 1.0)
        accuracy = min(max(right / size, 0.0), 1.0)
        result = {
            "holdout_accuracy": round(accuracy, 4),
            "holdout_deviation": round(sigma * math.sqrt(1 + accuracy**2) / size, 4),
            "holdout_epsilon": ledger.report().epsilon,
        }
    write_durably(path, json.dumps(result, indent=2) + "\n")
    return result
