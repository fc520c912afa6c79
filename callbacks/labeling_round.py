"""One round of labelling: select queries, extract features, query the private teacher, store the answers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from pl_privknn._checks import InputError, check_path, check_positive
from pl_privknn._lightning import rank_zero_info, rank_zero_warn
from pl_privknn._processes import ProcessGroup, Shard
from pl_privknn._progress import ProgressHook
from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.callbacks.selection import PublicPool, Selection, Selector
from pl_privknn.features.backbone import BackboneFeatures, undisturbed
from pl_privknn.features.base import Extractor, PublicTables, alike, extract_on, learn_publicly
from pl_privknn.features.private_records import COMPARED, PrivateRecords, is_foreign, kept_apart
from pl_privknn.labelers.base import (
    JoinsRuns,
    Labeler,
    MakesModel,
    Release,
)
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.files import write_durably
from pl_privknn.privacy.mechanisms.base import Adjacency, Charge, Unit
from pl_privknn.privacy.records import check_owners, is_ours
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.verify import HEAD

if TYPE_CHECKING:
    from pl_privknn import _lightning as pl
    from pl_privknn.datamodules.base import PrivatePublicDataModule
    from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
    from pl_privknn.students.losses import Outputs


_BYTES = 4  # of a float32
#: Teachers that take shards, in words.
SHARDED = "PrivateKNN, ReverseKNN, IndKNN, NoisySGDTeacher, PATE with RandomPartition, or one of sums"


class ScratchFullError(OSError):
    """Raised where a disk has too little room for the table of private features."""


@dataclasses.dataclass(frozen=True)
class FeatureStore:
    """Storage of the table of private features: in memory up to a limit, else mapped from a file.

    The file can be opened by its owner alone (mode 0600) and has no name: when the process ends, in whatever way, the
    system takes its space back. What was written may stay on the disk's free blocks, as with every deleted file;
    use an encrypted disk where that matters.

    Teachers that read records block by block (``ReverseKNN``) hold no table, whatever is set here.

    Args:
        limit_gb: gigabytes (10⁹ bytes) up to which a table is held in memory. None: always in memory.
        scratch: the folder in which the file is made; on a disk, not on a file system in memory. None:
            where the run keeps what is private, next to the run's folder.

    Raises:
        ValueError: for a limit that is not above 0.

    Example:
        >>> from pl_privknn.callbacks.labeling_round import FeatureStore
        >>> FeatureStore(limit_gb=4.0).limit_gb
        4.0
    """

    limit_gb: float | None = None
    scratch: str | Path | None = None

    def __post_init__(self) -> None:
        if self.limit_gb is not None:
            check_positive("limit_gb", self.limit_gb)
            if os.name != "posix":
                raise ValueError(
                    f"limit_gb={self.limit_gb!r} needs a system where an open file can lose its name (Linux, macOS); "
                    "leave it out"
                )
        if self.scratch is not None:  # checkpoints hold plain types alone
            object.__setattr__(self, "scratch", check_path("scratch", self.scratch))

    def table(self, rows: int, columns: int, folder: Path) -> Tensor:
        """Allocate a table, float32 ``(rows, columns)``.

        Args:
            rows: number of records. **Private**.
            columns: number of features.
            folder: for :attr:`scratch` of None.

        Raises:
            OSError: where the folder can't be written to, or its disk has too little room.
        """
        size = rows * columns * _BYTES
        if self.limit_gb is None or size <= self.limit_gb * 1e9:
            return torch.empty(rows, columns, dtype=torch.float32)
        place = folder if self.scratch is None else Path(self.scratch)
        made = _missing(place)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(place).free < size:
            raise ScratchFullError(
                f"memory.scratch={str(place)!r}: its disk has too little room for the table of private features; "
                "name a folder on a larger disk, or raise memory.limit_gb"
            )
        try:
            with tempfile.TemporaryFile(dir=place) as file:  # mode 0600, and without a name
                if hasattr(
                    os, "posix_fallocate"
                ):  # room is taken now: a full disk later would end the process
                    os.posix_fallocate(file.fileno(), 0, size)
                return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(rows, columns)))
        finally:
            with contextlib.suppress(OSError):  # not empty: others were faster
                for parent in made:
                    parent.rmdir()


def _missing(folder: Path) -> list[Path]:
    """Folders that don't exist: a folder and its parents, the innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


# Features of one image may differ by the order of sums between processes, and no more: a part of their length.
_SAME = 1e-3


@dataclasses.dataclass
class LabelingRound:
    """One round of labelling; :meth:`run_round` can be repeated after a crash and never charges twice.

    Args:
        labeler: the private teacher.
        extractor: turns private and public images into vectors.
        select: chooses the queries.
        num_queries: how many queries the round may make.
        max_answers: how many answers all rounds of the run may give together.
        query_batch_size: queries that are paid for and stored together. A crash loses at most one batch.
        seed: for choices at random among public examples.
        predict: the student's class probabilities of public images, or None.
        memory: where the table of private features is held, for teachers that need one.
        check: called before each batch is paid for; raises where the round must not go on. None in one process.
        unit: unit of privacy.
        shard: private records that this process reads; None where global rank 0 reads all.
        device: where features are extracted and the labeler searches; where tensors lie if None.
        class_prior: shares of the classes in use, by which a teacher's own model is shifted.
        conditions: what the run's guarantee says of extractors; a round with another one is refused.
    """

    labeler: Labeler
    extractor: Callable[[Tensor], Tensor]
    select: Selector
    num_queries: int
    max_answers: int
    query_batch_size: int
    seed: int
    predict: Callable[[Tensor], Tensor] | None = None
    check: Callable[[], None] | None = None
    memory: FeatureStore = FeatureStore()
    unit: Unit = "record"
    shard: Shard | None = None
    device: torch.device | None = None
    class_prior: Sequence[float] | None = None
    conditions: Sequence[str] = ()
    _public: Tensor | None = dataclasses.field(default=None, init=False, repr=False)
    _extract: Callable[[Tensor], Tensor] | None = dataclasses.field(default=None, init=False, repr=False)
    _one_by_one: bool = dataclasses.field(default=False, init=False, repr=False)

    def run_round(
        self,
        index: int,
        data: PrivatePublicDataModule,
        run: LabelRun,
        progress: ProgressHook,
    ) -> None:
        """Ask the remaining queries of round ``index`` and write each batch of answers to the run's file.

        Every process calls this. Global rank 0 chooses queries, pays and commits; other processes do what the teacher
        does with their shards, and nothing where global rank 0 reads all records.

        Args:
            index: of the round.
            data: has the private and public examples.
            run: pays, and keeps queries and answers.
            progress: see :data:`~pl_privknn._progress.ProgressHook`.

        Raises:
            BudgetExceeded: if a charge would pass the budget; earlier batches stay in the run's file.
            RedactedError: in the place of an exception that the teacher, the extractor or the data module
                raised on private records; see :func:`~pl_privknn.privacy.redaction.redacted`.
        """
        if not run.leads and self.shard is None:
            return  # global rank 0 reads all private records
        labeler = self.labeler
        paying = labeler.paying(run.ledger_run if run.leads else None, self.unit, self.shard)
        run.processes = paying.processes
        examples, positions = run.open_round(index, functools.partial(self._choose, index, data, run))
        if not positions or run.answers_left(self.max_answers) <= 0:
            return
        asked = run.stored.selections(index + 1)[index] if run.leads else None
        means = None
        if asked is not None and asked.ask_means:
            means = asked.query_features(self._public_features(data))
        if isinstance(labeler, JoinsRuns):
            redacted(labeler.join_run, run.private / run.run_id, paying)
        self._check_alike(data)
        progress("fitting the private teacher", 0, None)
        redacted(labeler.fit, redacted(self._records, data, run.private))
        progress("fitting the private teacher", 1, None)
        # One release may answer all queries of a round at once: such a teacher must not be asked piecewise.
        size = self.query_batch_size if labeler.capabilities.in_batches else len(positions)
        for batch in torch.tensor(positions).split(size):
            if (left := run.answers_left(self.max_answers)) <= 0:
                break
            places = batch.tolist()
            chosen = [examples[place] for place in places]
            known = None if means is None else means[places]
            features = run.processes.from_first(functools.partial(self._query_features, data, chosen, known))
            if self.check is not None:
                self.check()
            run.mark_asked(index, places)
            release = redacted(labeler.label, features, paying, max_answers=left)
            if run.leads:
                self._keep(index, run, places, release, is_first=places[0] == positions[0])
            done = len(examples) - len(positions) + positions.index(places[-1]) + 1
            progress("querying the private teacher", done, len(examples))

    def _keep(
        self, index: int, run: LabelRun, positions: list[int], release: Release, is_first: bool
    ) -> None:
        """Write the answers of a batch and, with a round's first batch, the model of the releases."""
        if is_first:
            soft = release.probabilities
            shift = None if soft is None else prior_shift(soft[: len(positions)], self.class_prior)
            save_head(run.folder, self.labeler, self.extractor, shift)
        run.put(index, positions, release)
        if release.scores is None and run.stored.has_spread(index):
            rank_zero_warn(
                f"{type(self.labeler).__name__} releases no noisy counts to smooth: every public example takes "
                "its own cluster's answer. Use ClusterSelection(), or a teacher such as ReverseKNN"
            )

    def _query_features(
        self, data: PrivatePublicDataModule, examples: list[int], known: Tensor | None
    ) -> Tensor:
        """Features of queries: the selection's own, or those of the public examples."""
        if known is not None:
            return known
        if self._public is not None:
            return self._public[examples]
        return self._ready(data)(data.public.images(torch.tensor(examples)))

    def _check_alike(self, data: PrivatePublicDataModule) -> None:
        """Raise ``RuntimeError`` where processes extract different features of the first public example."""
        self._ready(data)
        if self.shard is None:
            return
        own = self._first_public(data)
        wanted = self.shard.group.from_first(lambda: own)
        if own.shape != wanted.shape or bool((own - wanted).norm() > _SAME * wanted.norm()):
            raise RuntimeError(
                "features: this process computes others of a public example than global rank 0; start all "
                "processes with the same configuration, data and library versions"
            )

    def _choose(self, index: int, data: PrivatePublicDataModule, run: LabelRun) -> Selection:
        """Choose the queries of a round."""
        asked = torch.zeros(len(data.public), dtype=torch.bool)
        asked[list(run.stored.asked_examples())] = True
        labels = torch.full((len(data.public),), -1, dtype=torch.int64)
        answered, values, _ = run.stored.answers(index)
        labels[answered] = values if values.ndim == 1 else 0  # answered is all that matters of attributes
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        tables = PublicTables(data.public)
        pool = PublicPool(
            labels,
            asked,
            lambda: self._public_features(data),
            run.stored.selections(index),
            None if index == 0 or self.predict is None else functools.partial(tables.extracted, self.predict),
        )
        selection = self.select(pool, self.num_queries, generator)
        examples = selection.examples.tolist()
        if len(examples) > self.num_queries or len(set(examples)) < len(examples):
            raise ValueError(
                f"selection: it chose {len(examples)} queries, {len(set(examples))} of them different, where "
                f"{self.num_queries} are planned; a selector returns at most `count` different examples"
            )
        if selection.spread is not None and data.task != "multiclass":
            raise ValueError(
                f"selection: counts are smoothed into one class an example, the data is {data.task}; use "
                "spread='nearest'"
            )
        return selection

    def _ready(self, data: PrivatePublicDataModule) -> Callable[[Tensor], Tensor]:
        """Extractor of the round, fitted to all public images."""
        if self._extract is None:
            place = self.device or torch.device("cpu")
            alone, conditions = public_extractor(self.extractor, data, place)
            check_stated(conditions, self.conditions)
            self._extract, self._one_by_one = (
                functools.partial(extract_on, alone, device=place),
                bool(conditions),
            )
        return self._extract

    def _first_public(self, data: PrivatePublicDataModule) -> Tensor:
        return self._ready(data)(data.public.images(torch.arange(1))).cpu()

    def _public_features(self, data: PrivatePublicDataModule) -> Tensor:
        if self._public is None:
            ready = self._ready(data)
            if isinstance(self.extractor, Extractor) and not is_foreign(self.extractor):
                self._public = PublicTables(data.public, self.device).features(self.extractor)
            else:
                self._public = PublicTables(data.public).extracted(ready)
        return self._public

    def _records(self, data: PrivatePublicDataModule, folder: Path) -> PrivateRecords:
        """Private records of this process with the features of the round's extractor."""
        shard, rows = self.shard, None
        if shard is None and not len(data.private):
            raise InputError("the data module's private set is empty; a teacher needs private records")
        if shard is not None and not data.private_in_shards:
            rows = shard.rows
            if rows is None:
                rows = torch.arange(len(data.private))[shard.first :: shard.stride]
        extract = self._ready(data)
        return PrivateRecords(
            data.private,
            extract,
            one_by_one=self._one_by_one,
            owners=data.private_groups if self.unit == "person" else None,
            ids=data.private_ids,
            rows=rows,
            shard=shard,
            public=functools.partial(self._public_features, data),
            allocate=functools.partial(self.memory.table, folder=folder),
            device=self.device,
        )


def public_extractor(
    extractor: Callable[[Tensor], Tensor], data: PrivatePublicDataModule, device: torch.device
) -> tuple[Callable[[Tensor], Tensor], tuple[str, ...]]:
    """Extractor fitted to public images, checked to process examples independently, with its conditions.

    Args:
        extractor: of a round.
        data: has the public images.
        device: of images.

    Raises:
        ValueError: for an extractor that mixes the images of a batch.
    """
    learn_publicly(extractor, PublicTables(data.public, device))
    if not is_foreign(extractor):
        return extractor, ()
    return kept_apart(extractor, data.public.images(torch.arange(min(COMPARED, len(data.public)))), device)


def check_stated(conditions: Iterable[str], stated: Container[str]) -> None:
    """Raise ``ValueError`` for a condition that the run's plan does not state."""
    if new := [condition for condition in conditions if condition not in stated]:
        raise ValueError(
            f"features: the run was stated without the condition that {new[0]}; use the features that it began with, "
            "or start a new run"
        )


def prior_shift(soft: Tensor, class_prior: Sequence[float] | None) -> Tensor | None:
    """Factors on class probabilities by the assumed class shares; None where no shares are given.

    A teacher's answers assume the shares of the private table: their own mean over the public examples is what was
    released of these. By Bayes' rule p(class | x) moves by the ratio of both shares.

    Args:
        soft: released probabilities of public examples, ``(n, c)``.
        class_prior: shares in use, a public constant.
    """
    if class_prior is None or not len(soft):
        return None
    assumed = soft.double().mean(dim=0).clamp_min(1e-6)
    return (torch.tensor(class_prior, dtype=torch.float64) / assumed).float()


def shifted(soft: Tensor, shift: Tensor | None) -> Tensor:
    """Probabilities ``(n, c)`` under the shares of classes in use."""
    if shift is None:
        return soft
    scaled = soft * shift.to(soft)
    return scaled / scaled.sum(dim=1, keepdim=True).clamp_min(1e-12)


def labels_in_use(
    labeler: Labeler, labels: Tensor, soft: Tensor | None, class_prior: Sequence[float] | None, is_first: bool
) -> tuple[Tensor, Tensor | None]:
    """Labels and probabilities under the given class shares; where none are given, log which shares are assumed.

    Args:
        labeler: released them.
        labels: of public examples.
        soft: their probabilities, or None.
        class_prior: shares in use, or None.
        is_first: whether the round is the first one.

    Raises:
        ValueError: where shares are given and there are no probabilities.
    """
    if labels.ndim != 1 or not len(labels):
        return labels, soft
    if class_prior is None:
        if soft is not None and is_first:
            shares = " ".join(f"{share:.2g}" for share in soft.double().mean(dim=0)[:10].tolist())
            rank_zero_info(
                f"class shares estimated from the noisy answers: {shares}; set options.class_prior if yours differ"
            )
        return labels, soft
    if soft is None:
        raise ValueError(
            f"class_prior: {type(labeler).__name__} releases no probabilities to adjust; leave class_prior out, or "
            "take ReverseKNN or PreconditionedGradients"
        )
    soft = shifted(soft, prior_shift(soft, class_prior))
    return torch.where(labels >= 0, soft.argmax(dim=1), labels), soft


def beside_paid_releases(
    error: BudgetExceeded, labeler: Labeler, before: Sequence[Charge], own: Sequence[Charge]
) -> BudgetExceeded:
    """Error of a plan that exceeds the budget, with its cause where noise of another kind does not fit.

    Args:
        error: as raised.
        labeler: the teacher.
        before: charges of public rows and names that the run pays for.
        own: charges of the teacher.
    """
    budget = error.budget
    others = [charge for charge in own if charge.mechanism.gaussian_mu(budget.adjacency) is None]
    if not before or not others:
        return error
    return BudgetExceeded(
        f"labeler: {type(labeler).__name__} with {others[0].mechanism.label} noise, after the Gaussian releases of "
        f"public rows or names that the run pays for, would reach ε={error.epsilon:.4g}, above "
        f"epsilon={budget.epsilon:g}; nothing was charged. Use labeler=PreconditionedGradients(), or a teacher with "
        "noise=Gaussian(sigma), or give public rows and state classes, kinds and bounds",
        error.epsilon,
        budget,
    )


#: What a run may release as its model; ``"ensemble"`` averages the probabilities of student and head.
MODELS = ("student", "head", "ensemble")
# Least share of public examples on which student and head agree for their ensemble to be released, and how many are
# looked at.
_AGREEMENT, _LOOKED_AT = 0.9, 2_000


class ReleasedHead(nn.Module):
    """Map of images to class probabilities by a teacher's releases. Post-processing: no further privacy cost.

    Args:
        labeler: of the class and the settings that released.
        extractor: of the class and the settings that made the features.
        state: what :func:`save_head` wrote.
    """

    def __init__(
        self, labeler: Labeler, extractor: Callable[[Tensor], Tensor], state: dict[str, dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self.extractor = extractor
        if isinstance(extractor, Extractor) and extractor.learns:
            # The run's own goes on learning in later rounds.
            self.extractor = copy.deepcopy(extractor)
            self.extractor.load_state_dict(state["extractor"])
        if not isinstance(labeler, MakesModel):
            raise TypeError(f"labeler={type(labeler).__name__} releases no model")
        #: Whether its predictions are computed by code from outside this package.
        self.calls_others = not is_ours(labeler)
        self._predict, self._shift = labeler.head(state["head"]), state.get("shift", {}).get("prior")

    def has_features_of(self, module: nn.Module) -> bool:
        """Whether a student's extractor gives the features of this head."""
        return alike(self.extractor, getattr(module, "extractor", None))

    @torch.no_grad()
    def forward(self, images: Tensor, features: Tensor | None = None) -> Tensor:
        """Probabilities of images, of classes or attributes, float32 ``(n, c)`` on the CPU.

        Args:
            images: ``(n, channels, height, width)``.
            features: of these images, where they are known (:meth:`has_features_of`).
        """
        if features is None:
            place = images.device if images.device.type == "cuda" else torch.device("cpu")
            features = extract_on(self.extractor, images, place)
        return shifted(self._predict(features.cpu()).float(), self._shift)


@torch.no_grad()
def model_for(
    released: str,
    head: ReleasedHead | None,
    student: pl.LightningModule,
    public: PublicDataset,
    outputs: Outputs,
) -> str:
    """Model that a run releases, one of :data:`MODELS`; of ``"auto"`` it is decided by public examples.

    Student and head are averaged where both predict alike, else the head is released: the student then learned too
    little of what it was taught, or was taught about examples of another kind.

    Args:
        released: one of :data:`MODELS`, or ``"auto"``.
        head: the model of a teacher's releases, or None.
        student: the trained module.
        public: the public examples.
        outputs: reads the student's outputs.
    """
    if released != "auto":
        return released
    if head is None:
        return "student"
    place, agreed = torch.device(student.device), list[Tensor]()
    with undisturbed(student, place):
        for rows in torch.arange(min(_LOOKED_AT, len(public))).split(500):
            images = public.images(rows).to(place)
            own, taught = head(images), outputs.probabilities(student(images)).cpu()
            agreed.append(outputs.hits(taught, outputs.decisions(own)).double())
    return "ensemble" if float(torch.cat(agreed).mean()) >= _AGREEMENT else "head"


@torch.no_grad()
def outcomes_alone(
    model: str, head: ReleasedHead | None, student: pl.LightningModule, held: LabeledImages, outputs: Outputs
) -> tuple[Tensor, tuple[str, ...]]:
    """**Private.** Predictions of a released model for each held-out record alone.

    Args:
        model: one of :data:`MODELS`.
        head: the model of a teacher's releases, or None.
        student: the trained module.
        held: the records.
        outputs: reads the student's outputs; see :meth:`Outputs.hits`.

    Returns:
        What :func:`~pl_privknn.privacy.holdout.counts_of` takes, and the conditions on which it rests that each is
        predicted from that record alone.
    """
    records, parts = PrivateRecords(held, nn.Identity()), list[Tensor]()
    conditions: tuple[str, ...] = ()
    if head is not None and model != "student":
        found, conditions = records.map(head)
        parts.append(found)
    if model != "head":
        with undisturbed(student, torch.device(student.device)):
            found, more = records.map(student)
        parts.append(outputs.probabilities(found))
        conditions += more
    mean = torch.stack(parts).mean(dim=0)
    if held.labels.ndim == 2:
        return outputs.hits(mean, held.labels), conditions
    return torch.stack([held.labels, mean.argmax(dim=1)], dim=1), conditions


def save_head(
    folder: Path, labeler: Labeler, extractor: Callable[[Tensor], Tensor], shift: Tensor | None = None
) -> None:
    """Write the head to a run's folder, where the releases give a model of fixed features; it is public."""
    head = labeler.head_state() if isinstance(labeler, MakesModel) else None
    if head is None or _of_student(extractor):
        return
    learned = extractor.state_dict() if isinstance(extractor, Extractor) else {}
    buffer = io.BytesIO()
    moved = {} if shift is None else {"shift": {"prior": shift}}
    torch.save({"head": head, "extractor": learned, **moved}, buffer)
    write_durably(folder / HEAD, buffer.getvalue())


def load_head(folder: Path, labeler: Labeler, extractor: Callable[[Tensor], Tensor]) -> ReleasedHead | None:
    """Load the head in a run's folder; None where there is none."""
    path = folder / HEAD
    if not path.is_file():
        return None
    return ReleasedHead(labeler, extractor, torch.load(path, map_location="cpu", weights_only=True))


def remark_of(folder: Path, labeler: Labeler | None) -> str:
    """Sentence on findings in a run's releases, such as a shift of features; empty without any."""
    path = folder / HEAD
    if not isinstance(labeler, MakesModel) or not path.is_file():
        return ""
    return labeler.remark(torch.load(path, map_location="cpu", weights_only=True)["head"])


def _of_student(extractor: Callable[[Tensor], Tensor]) -> bool:
    """Whether the features contain a student's backbone, and so change during training."""
    if type(extractor) is BackboneFeatures:
        return True
    return any(_of_student(part) for part in getattr(extractor, "extractors", ()))


def shard_of(
    labeler: Labeler,
    data: PrivatePublicDataModule,
    group: ProcessGroup,
    sharded: bool,
    adjacency: Adjacency = "add_remove",
    unit: Unit = "record",
) -> Shard | None:
    """Private records that this process reads; None where global rank 0 reads all. Each process calls it.

    Args:
        labeler: the teacher that is to look at them.
        data: has each process's own records, or all of them in every process.
        group: the processes.
        sharded: whether a process reads every so many-th record, where all are in every process.
        adjacency: neighbouring relation of the ledger.
        unit: unit of privacy; a person lies in one shard.

    Raises:
        ValueError: for shards that the labeler can't look at, processes that hold different records, or a person
            whose records lie in several.
    """
    if group.size == 1 or not (sharded or data.private_in_shards):
        return None
    can = labeler.capabilities
    if not can.shards:
        raise ValueError(
            f"labeler: {type(labeler).__name__} with these settings looks at private records in one process; use a "
            f"teacher that takes shards ({SHARDED}), or sharded=False and one file"
        )
    if adjacency not in can.shards:
        raise ValueError(
            f"adjacency={adjacency!r} is not among those of {type(labeler).__name__} in shards: "
            f"{', '.join(can.shards)}; use one of these, or one process"
        )
    if not data.private_in_shards and can.lasting_shards:
        raise ValueError(
            f"sharded=True: {type(labeler).__name__} needs shards in which records stay, and where one is removed "
            "the rows of others move; give each process a separate file (private_embeddings: x-{rank:05d}.npy)"
        )
    if not data.private_in_shards:
        data.private.check_same(group.agree)
        if unit == "person":
            owners = check_owners(data.private_groups, len(data.private))
            rows = (owners % group.size == group.rank).nonzero().flatten()
            return Shard(group, 0, 1, len(data.private), rows)
        return Shard(group, group.rank, group.size, len(data.private))
    if unit == "person":
        check_whole_persons(check_owners(data.private_groups, len(data.private)), group)
    counts = torch.zeros(group.size, dtype=torch.int64)
    counts[group.rank] = len(data.private)
    counts = group.sum(counts)
    return Shard(group, int(counts[: group.rank].sum()), 1, int(counts.sum()))


def check_whole_persons(owners: torch.Tensor, group: ProcessGroup) -> None:
    """Refuse shards that share a person; each process calls it.

    Args:
        owners: person of each of this process's records, int64 ``(n,)``. **Private**.
        group: the processes.

    Raises:
        ValueError: where a person has records in two of them, in every process.
    """
    own = owners.unique()
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(own)
    padded = torch.full((int(group.sum(sizes).max()),), -1, dtype=torch.int64)
    padded[: len(own)] = own
    persons = torch.cat([*group.gather(padded), owners[:0]])
    persons = persons[persons >= 0]
    if int(group.sum(torch.tensor([len(persons) - len(persons.unique())]))[0]):
        raise ValueError(
            "private_groups: a person has records in several shards, where they would be counted separately; put all "
            "records of a person into one process's file"
        )


def same_buffers(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Broadcast a network's buffers from global rank 0, so that all shards extract equal features.

    Its parameters are the same already: the training takes the same steps in every process. Batch-norm statistics are
    of each process's own last batch.
    """
    values = group.broadcast({name: buffer.cpu() for name, buffer in module.named_buffers()})
    for name, buffer in module.named_buffers():
        buffer.copy_(values[name])
