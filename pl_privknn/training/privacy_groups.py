"""Groups of private records, each with its ε: the same noise and different sampling rates."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn._checks import check_rate
from pl_privknn.privacy.folders import private_folder
from pl_privknn.privacy.noisy_steps import noise_for_steps
from pl_privknn.privacy.private_store import FILE_NAME, PrivateStore
from pl_privknn.privacy.record_budgets import RecordKey, as_bytes
from pl_privknn.privacy.record_groups import RecordGroups, rate_for_steps

_KEY_BYTES = 32
# Relative distance of the expected batch from the one that was asked for, where the noise is searched.
_CLOSE = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyGroups(RecordGroups):
    """Groups of records, each with the ε that its owners chose (Boenisch et al. 2023, "Have it your way", *Sample*).

    All steps have the same noise and the same clipping norm. A record of group g takes part in a step with the
    probability at which all steps together cost just about ``epsilons[g]``. Adding or removing one record of g is
    covered by ``epsilons[g]``; the training as a whole by the largest, which is what the ledger promises.

    Who is in a group follows from the record alone, see :class:`~pl_privknn.privacy.record_groups.RecordGroups`.
    To move a record from g to h is to remove it and to add another one, which costs both. A resumed training is held
    to the same records and members, in any order, by a keyed digest in the private folder next to the run's.

    Args:
        members: group of each private record in the data module's order, whole numbers from 0, shape ``(n,)``, or
            the path of a ``.npy`` file with them.
        epsilons: ε of each group.
        shares: about what share of the records each group is, public constants that sum to 1 and are not counted
            from the records; they place the noise, and no ε hangs on them.

    Raises:
        ValueError: for arguments that don't fit each other.

    Example:
        >>> import torch
        >>> from pl_privknn.privacy import Charge, Gaussian, epsilon_for_delta
        >>> from pl_privknn.training import PrivacyGroups, PrivateTraining
        >>> groups = PrivacyGroups(torch.arange(60_000) % 2, epsilons=(1.0, 2.0), shares=(0.5, 0.5))
        >>> training = PrivateTraining(
        ...     noise_multiplier=1.0, expected_batch_size=512, private_records=60_000, groups=groups
        ... )
        >>> rates = groups.rates(1.0, 1e-5, 236)
        >>> costs = [epsilon_for_delta([Charge(Gaussian(1.0, 1.0, rate), 236)], delta=1e-5) for rate in rates]
        >>> [round(cost, 2) for cost in costs]
        [1.0, 2.0]
    """

    shares: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.epsilons) != len(self.shares):
            raise ValueError(f"epsilons={self.epsilons!r}, shares={self.shares!r}: give one of each a group")
        for share in self.shares:
            check_rate("shares", share)
        if not math.isclose(sum(self.shares), 1.0, abs_tol=1e-6):
            raise ValueError(f"shares={self.shares!r} sum to {sum(self.shares):g}; let them sum to 1")

    def rates(self, noise_multiplier: float, delta: float, steps: int) -> list[float]:
        """Poisson rate of each group; 1 where all of its records in every step cost less than its ε.

        Args:
            noise_multiplier: of all steps.
            delta: δ of the guarantee.
            steps: of the whole training.

        Raises:
            ValueError: where a group's ε can't be met.
        """
        return [rate_for_steps(e, delta, noise_multiplier, steps) for e in self.epsilons]

    def noise_for(self, mean_rate: float, delta: float, steps: int) -> float:
        """Noise multiplier at which the groups' rates give about the expected batch size.

        Args:
            mean_rate: expected batch over expected records.
            delta: δ of the guarantee.
            steps: of the whole training.

        Raises:
            ValueError: where a group's ε can't be met.
        """
        # Rates go about as ε does, so the mean ε is near.
        mean = sum(share * epsilon for share, epsilon in zip(self.shares, self.epsilons, strict=True))
        noise = noise_for_steps(mean, delta, mean_rate, steps)
        for _ in range(20):
            rates = self.rates(noise, delta, steps)
            found = sum(share * rate for share, rate in zip(self.shares, rates, strict=True))
            if abs(found / mean_rate - 1) <= _CLOSE or min(rates) == 1.0:
                break
            # ε hangs on rate over noise where there is much noise; where there is little, on more than that.
            noise = float(f"{noise * (mean_rate / found) ** (0.9 if noise > 1 else 0.5):.4g}")
        return noise


def check_members(
    run_dir: Path, run_id: str, records: Iterable[tuple[Tensor, Tensor]], members: Tensor, begun: bool
) -> None:
    """Note the members of a training before its first step; refuse changed members afterwards.

    A record that changed its group would take part in some steps at one rate and in others at another, which no
    group's ε covers. One keyed digest of all records with their groups, whatever their order, lies in the run's
    private file, for the owner alone.

    Args:
        run_dir: the run's folder.
        run_id: the run.
        records: images and labels of all private records, in blocks.
        members: group of each, int64 ``(n,)``.
        begun: whether a step has been paid for.

    Raises:
        ValueError: if records or groups are not those with which the training began.
        FileNotFoundError: if nothing says any more which they were.
    """
    path = private_folder(run_dir) / run_id / FILE_NAME
    noted = b""
    if not begun or path.is_file():
        with contextlib.closing(PrivateStore(path, one_place=False)) as store:
            if not begun:
                key = secrets.token_bytes(_KEY_BYTES)
                store.note("members", (key + _digest(key, records, members)).hex())
                return
            noted = bytes.fromhex(store.fact("members", ""))
    if not noted:
        raise FileNotFoundError(
            f"groups: {path} is missing, which says whether members are those of the first steps; restore it, or "
            "start a new training in another folder, which is charged again"
        )
    key = noted[:_KEY_BYTES]
    if not secrets.compare_digest(noted[_KEY_BYTES:], _digest(key, records, members)):
        raise ValueError(
            "groups: private records or their members are not those with which this training began, and a record "
            "that changes its group has no ε; go back to them, or start a new training in another folder, which "
            "costs anew"
        )


def _digest(key: bytes, records: Iterable[tuple[Tensor, Tensor]], members: Tensor) -> bytes:
    """Digest of the sorted digests of single records, each with its labels and its group."""
    each: list[bytes] = []
    for images, labels in records:
        groups = members[len(each) : len(each) + len(images), None]
        numbers = torch.cat([labels.reshape(len(labels), -1).long(), groups], dim=1)
        each += as_bytes(RecordKey(key).digests(images, numbers))
    return hashlib.blake2b(b"".join(sorted(each)), key=key, digest_size=32).digest()
