"""Partition selection: classes, kinds of columns and categories that nobody states, paid for before a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn._checks import check_open_unit
from pl_privknn.privacy.accounting.accountant import epsilon_for_delta
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.ledger import LedgerRun
from pl_privknn.privacy.mechanisms import Charge, Exposure, Gaussian
from pl_privknn.privacy.mechanisms.steps import noise_for_steps
from pl_privknn.privacy.noise import NoiseSource
from pl_privknn.privacy.public_rows import PART, PublicRowsLost, cell_counts, person_parts

#: File of a run's folder: released names and kinds.
NAMES = "names.json"
_MOST_CLASSES = 4  # that a person counts in


@dataclasses.dataclass(frozen=True)
class PaidNames:
    """Release of the classes, and of the kinds of columns and their categories, that nobody states.

    **Classes** are partitions of the records: each record counts in one with weight 1, a person in the m classes,
    four at most, that most of their records have, with weights 1/√m. The counts of all classes that occur get
    Gaussian noise, and the names of those whose noisy count reaches a threshold are released; of the others nothing
    is, nor their number (Desfontaines, Voss, Gipson, Mandayam 2022; Google's and OpenDP's libraries). **Kinds**
    follow from one noisy histogram a column of what its cells look like, a person adding the mean of the parts of
    their records. **Values** of d columns are partitions as classes are, of each column by itself.

    **Sensitivity.** Under ``add_remove`` a record or person moves counts of classes by 1, and those of d columns, or
    d histograms, by √d in L2 norm; under ``replace_one`` √2 times as much. A class that a single record or person has
    may be released with one table and not with its neighbour. The threshold T is such that this has the probability
    δ₁ at most: m·P[1/√m + noise ≥ T] ≤ δ₁ (of values δ₁/d), the mechanism
    :class:`~pl_privknn.privacy.mechanisms.Exposure`. Otherwise both tables show the same classes by counts with
    Gaussian noise. So the release costs what Exposure and Gaussian cost together.

    Attributes:
        classes: whether classes are paid for.
        columns: columns whose kinds are paid for.
        categories: columns whose values are paid for, in case that they are categories.
        share: share r₁ of the run's μ for the classes.
        kinds: share r₂ for the kinds.
        values: share r₃ for the values; √(1 − r₁² − r₂² − r₃²) of μ is left.
        exposure: δ₁ over the run's δ; twice that is spent where both classes and values are paid for.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn.privacy import Budget, epsilon_for_delta
        >>> names, budget = PaidNames(classes=True), Budget(epsilon=1.0, delta=1e-5)
        >>> round(epsilon_for_delta(names.plan(budget), 1e-5), 3), round(names.threshold(budget), 1)
        (0.173, 90.3)
        >>> round(names.left(budget).epsilon, 3)
        0.971
    """

    classes: bool = False
    columns: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    share: float = 0.2
    kinds: float = 0.15
    values: float = 0.15
    exposure: float = 0.1

    def __post_init__(self) -> None:
        for name in ("columns", "categories"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("share", "kinds", "values", "exposure"):
            check_open_unit(name, getattr(self, name))
        if self.share**2 + self.kinds**2 + self.values**2 >= 1 or self.exposure >= 0.5:
            raise ValueError(
                f"share={self.share}, kinds={self.kinds}, values={self.values}, exposure={self.exposure}: nothing is "
                "left to the run; squares of the shares must sum to less than 1, and twice the exposure"
            )

    def plan(self, budget: Budget) -> list[Charge]:
        """Charges of the releases, in their order."""
        exposure = Charge(Exposure(self.exposure * budget.delta))
        return [exposure] * self._selections + [
            *(Charge(mechanism) for mechanism in self.mechanisms(budget).values())
        ]

    @property
    def _selections(self) -> int:
        """Number of partition selections: of classes, of values."""
        return self.classes + bool(self.categories)

    def mechanisms(self, budget: Budget) -> dict[str, Gaussian]:
        """Noise of the counts of ``"classes"`` and ``"values"`` and of the histograms of ``"kinds"``."""
        moved = 1.0 if budget.adjacency == "add_remove" else math.sqrt(2.0)
        found = {"classes": (self.share, moved)} if self.classes else {}
        if self.columns:
            found["kinds"] = (self.kinds, moved * math.sqrt(len(self.columns)))
        if self.categories:
            found["values"] = (self.values, moved * math.sqrt(len(self.categories)))
        mu = self._mu(budget)
        return {name: Gaussian(size / (share * mu), size, 1.0) for name, (share, size) in found.items()}

    def threshold(self, budget: Budget, name: str = "classes") -> float:
        """Least noisy count with which a class is released, or a value (``name="values"``); see the class."""
        most = 1 if budget.unit == "record" else _MOST_CLASSES
        m, sigma = torch.arange(1, most + 1).double(), self.mechanisms(budget)[name].sigma
        columns = 1 if name == "classes" else len(self.categories)
        tails = torch.special.ndtri(self.exposure * budget.delta / (m * columns))
        return float((1 / m.sqrt() - sigma * tails).max()) + 1 / PART  # noise is rounded

    def left(self, budget: Budget) -> Budget:
        """Budget that the releases leave to a run whose releases are Gaussian."""
        if not (self.classes or self.columns or self.categories):
            return budget
        shares = (self.share, self.kinds, self.values)
        paid = (self.classes, self.columns, self.categories)
        spent = sum(share**2 for share, of in zip(shares, paid, strict=True) if of)
        mu = self._mu(budget) * math.sqrt(1 - spent)
        return dataclasses.replace(
            budget, epsilon=epsilon_for_delta([Charge(Gaussian(1 / mu))], budget.delta)
        )

    def _mu(self, budget: Budget) -> float:
        """Largest μ within a budget, beside the exposures."""
        assert budget.epsilon is not None
        exposure = self.exposure * budget.delta * self._selections
        return 1 / noise_for_steps(budget.epsilon, (budget.delta - exposure) / (1 - exposure), 1.0, 1)


@dataclasses.dataclass(frozen=True)
class UnnamedRecords:
    """What names are released of. **Private**.

    Attributes:
        classes: name of the class of each record; empty of records without one, which count in none.
        cells: of each column whose kind is paid for the number of each record's cell, int64 ``(n,)``, and the number
            of cells.
        values: of each column whose values are paid for the cell of each record, empty where there is none.
        owners: person of each record, int64 ``(n,)``, where the unit of privacy is a person.
    """

    classes: Sequence[str]
    cells: Sequence[tuple[Tensor, int]] = ()
    values: Sequence[Sequence[str]] = ()
    owners: Tensor | None = None


def class_counts(classes: Sequence[str], owners: Tensor | None = None) -> tuple[list[str], Tensor]:
    """**Private.** Different classes in their order, and the weight of the records or persons of each.

    Args:
        classes: see :class:`UnnamedRecords`.
        owners: likewise.

    Returns:
        The names, and int64 ``(n,)``, in steps of 1 / PART.
    """
    found = Counter[str]()
    if owners is None:
        found.update(name for name in classes if name)
        return sorted(found), torch.tensor([PART * found[name] for name in sorted(found)], dtype=torch.int64)
    of = dict[int, Counter[str]]()
    for name, owner in zip(classes, owners.tolist(), strict=True):
        if name:
            of.setdefault(owner, Counter())[name] += 1
    for counts in of.values():
        kept = sorted(counts, key=lambda name: (-counts[name], name))[:_MOST_CLASSES]
        found.update(dict.fromkeys(kept, math.floor(PART / math.sqrt(len(kept)))))
    return sorted(found), torch.tensor([found[name] for name in sorted(found)], dtype=torch.int64)


def release_names(
    settings: PaidNames,
    folder: Path,
    run: LedgerRun,
    budget: Budget,
    noise: NoiseSource,
    records: Callable[[], UnnamedRecords],
) -> dict[str, Any]:
    """Release names and kinds, once a run; a second call returns what the first one released.

    Args:
        settings: what is paid for.
        folder: of the run, for the file :data:`NAMES`.
        run: pays.
        budget: of the run.
        noise: source of the noise.
        records: gives the private records.

    Returns:
        ``classes``, with their noisy counts, ``kinds``, the noisy histogram of each column, and ``values``, those of
        each column with their noisy counts.

    Raises:
        PublicRowsLost: where they were paid for and lost.
    """
    path = folder / NAMES
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    plan = settings.plan(budget)
    if any(run.charged(charge.mechanism) for charge in plan):
        raise PublicRowsLost(
            f"{path}: the run paid for its names, and a kill or an error came before they were kept; they are not "
            "drawn again. Start a new run in another folder, with this run's ledger as ledger_path"
        )
    private = records()
    for charge in plan:
        row = run.charge(charge.mechanism, 1, noise=noise, adjacencies=(budget.adjacency,), unit=budget.unit)
    found, mechanisms = dict[str, Any](), settings.mechanisms(budget)

    def selected(kind: str, key: str, words: Sequence[str]) -> dict[str, float]:
        names, counts = class_counts(words, private.owners)
        stream = noise.stream("names", kind, key, row)
        noisy = mechanisms[kind].add_noise_to_multiples(counts, 1 / PART, stream).tolist()
        threshold = settings.threshold(budget, kind)
        return {name: round(count, 1) for name, count in zip(names, noisy, strict=True) if count >= threshold}

    if "classes" in mechanisms:
        found["classes"] = selected("classes", "", private.classes)
    if "values" in mechanisms:
        columns = zip(settings.categories, private.values, strict=True)
        found["values"] = {name: selected("values", name, words) for name, words in columns}
    if "kinds" in mechanisms:
        parts = person_parts(private.owners, len(private.classes))
        sums, stream = cell_counts(private.cells, parts), noise.stream("names", "kinds", row)
        noisy_sums = mechanisms["kinds"].add_noise_to_multiples(sums, 1 / PART, stream)
        split = noisy_sums.split([size for _, size in private.cells])
        found["kinds"] = {name: part.tolist() for name, part in zip(settings.columns, split, strict=True)}
    write_durably(path, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return found
