"""The callback that queries a private teacher between epochs of ``trainer.fit``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from pl_privknn._checks import check_choice, check_int, check_switch
from pl_privknn._processes import ProcessGroup
from pl_privknn._run_end import leave_report
from pl_privknn.argument_groups import read_groups
from pl_privknn.callbacks.fit_state import data_module, is_last_epoch, placeholders, same_buffers, shard_of
from pl_privknn.callbacks.label_run import LabelRun, RunTerms, digest_of, stored_run_id
from pl_privknn.callbacks.labeling_round import LabelingRound, rich_progress
from pl_privknn.callbacks.released_head import MODELS
from pl_privknn.callbacks.reports_run import ReportsRun
from pl_privknn.callbacks.round_settings import (
    LabelingBudget,
    RoundFeatures,
    check_device,
    check_fits,
    device_of,
    extractor_of,
    features_of_rounds,
    probabilities_of,
    queries_of_rounds,
)
from pl_privknn.callbacks.selection import SELECTORS, Selector
from pl_privknn.callbacks.table_memory import TableMemory
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features.base import Extractor
from pl_privknn.labelers.base import Labeler, stated_plan
from pl_privknn.labelers.protocols import JoinsRuns, ShardedLabeler
from pl_privknn.privacy.ledger.run_folder import resumed_folder
from pl_privknn.privacy.logged import check_declared
from pl_privknn.privacy.settings import RunFiles

_MOST_ROUNDS = 10**6  # each has its number of queries and its features


class PrivateLabeler(ReportsRun):
    """Queries a private teacher before the first epoch and again after every ``epochs_per_round`` epochs.

    Each round extracts features of private and public images, picks queries among the public images, lets
    the labeler answer them, and writes the answers into the public dataset, where the student's next epoch
    finds them. The worst case of all rounds is stated in the ledger, and checked against ``max_epsilon``,
    before anything is asked. Nothing is asked in ``fast_dev_run``, sanity checking, validation or after the
    last epoch, and a resumed run never asks again what it already paid for.

    Args:
        labeler: the private teacher; None makes the callback inert (for students on ordinary labels).
        rounds: number of rounds.
        epochs_per_round: epochs of student training between two rounds.
        queries_per_round: queries of each round, one number or one for each round. A later round of 0 queries
            only smooths earlier noisy counts anew (see ``selection``), which costs no privacy.
        max_answers: the most answers that all rounds may give together. The guarantee covers exactly this
            many, whatever happens. None: as many as there are queries.
        budget: ε and δ, and the neighbouring relation.
        features: what turns images into vectors, one extractor a round, the last one repeated; the word
            ``"student"`` stands for the student's own backbone, and a list within the list for several kinds of
            features side by side. Default: HOG first, then the student.
        selection: ``"random"`` (examples never asked about), ``"all"`` (every unanswered example),
            ``"uncertain"`` (those the student is least sure of), ``"clusters"`` (the centre of each cluster of
            public features; its cluster takes its answer), ``"smooth_clusters"`` (noisy counts smoothed over
            neighbouring clusters) or a :class:`~pl_privknn.callbacks.selection.Selector`.
        retrain: start the student afresh at each later round, as in the paper; False continues it.
        files: the run's folder and its ledger.
        query_batch_size: queries that are paid for and stored together; a kill loses at most one batch.
        seed: for the random choice of queries, a public matter; never for protective noise.
        progress: show a progress bar while labelling.
        memory: how large a table of private features may get in memory.
        device: where features are extracted and neighbours searched for; ``"auto"``: where the trainer is.
        sharded: let each process of the training search a share of the private records, for teachers that can.
        released: which model the run is for: ``"student"``, ``"head"`` (a teacher's own, if any) or their ``"mean"``.
        **flat: arguments of ``budget`` and ``files`` by themselves, for one release more.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn import PrivateKNN, PrivateLabeler
        >>> labeling = PrivateLabeler(PrivateKNN(), rounds=2, queries_per_round=500)
        >>> labeling.queries_per_round
        [500, 500]
    """

    def __init__(
        self,
        labeler: Labeler | None = None,
        *,
        rounds: int = 1,
        epochs_per_round: int = 10,
        queries_per_round: int | list[int] = 1000,
        max_answers: int | None = None,
        features: list[RoundFeatures] | Extractor | None = None,
        selection: str | Selector = "random",
        retrain: bool = True,
        budget: LabelingBudget = LabelingBudget(),
        files: RunFiles = RunFiles(),
        memory: TableMemory = TableMemory(),
        query_batch_size: int = 256,
        seed: int = 0,
        progress: bool = True,
        device: str = "auto",
        sharded: bool = False,
        released: str = "student",
        **flat: Any,
    ) -> None:
        groups = read_groups(PrivateLabeler, flat, budget=budget, files=files, memory=memory)
        budget, files, self.memory = groups.values()
        self.labeler = labeler
        self.rounds = check_int("rounds", rounds, maximum=_MOST_ROUNDS)
        self.epochs_per_round = check_int("epochs_per_round", epochs_per_round)
        self.queries_per_round = queries_of_rounds(queries_per_round, self.rounds)
        self.delta, self.max_epsilon, self.adjacency = budget.delta, budget.max_epsilon, budget.adjacency
        self.max_answers = None if max_answers is None else check_int("max_answers", max_answers)
        self.features = features_of_rounds(features)
        if selection not in SELECTORS if isinstance(selection, str) else not callable(selection):
            raise ValueError(f"selection={selection!r} must be one of {', '.join(SELECTORS)} or a Selector")
        self.select: Selector = SELECTORS[selection] if isinstance(selection, str) else selection
        self.selects_all = selection == "all"
        self.retrain = check_switch("retrain", retrain)
        self.run_dir, self.ledger_path, self.ledger_head_path = files.paths
        if labeler is not None:
            check_fits(labeler, self.adjacency, self.features, self.queries_per_round)
        self.released = check_choice("released", released, MODELS)
        self.query_batch_size = check_int("query_batch_size", query_batch_size)
        self.seed = check_int("seed", seed, minimum=0)
        self.progress = check_switch("progress", progress)
        self.device = check_device(device)
        self.sharded = check_switch("sharded", sharded)
        self._place = Path()
        super().__init__()
        self._loaded: dict[str, Any] | None = None
        self._epochs_before = 0
        self._rounds_applied = 0
        self._restart_due = False
        self._group = ProcessGroup()

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse trainers and data modules with which labels would go wrong."""
        if stage == "fit":
            leave_report(trainer)
        if stage != "fit" or self.labeler is None:
            return
        if (every := trainer.reload_dataloaders_every_n_epochs) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"reload_dataloaders_every_n_epochs={every} mis-schedules after a resume; set it to 0, the "
                "data module follows label changes by itself"
            )
        data_module(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Learn how many epochs lie behind the checkpoint."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
        self._epochs_before = int(progress.get("current", {}).get("processed", 0))

    def state_dict(self) -> dict[str, Any]:
        """Where the run's folder is and how far it came; the labels themselves lie in the folder."""
        if self._run is None:
            return {}
        return {
            "run_id": self._run.run_id,
            "run_dir": str(self._run.store.path.parent),
            "rounds_applied": self._rounds_applied,
            "restart_due": self._restart_due,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the folder of the checkpoint's run; ``on_fit_start`` continues it."""
        self._loaded = state_dict or None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """State the plan, then run or restore the rounds that are due before the next epoch."""
        if self.labeler is None:
            return
        data = data_module(trainer)
        if data.task not in self.labeler.tasks:
            fitting = "PrivateKNN"
            if data.task == "multilabel":
                fitting = "PrivateKNN with attributes, or PublicCurvature with task='multilabel'"
            raise ValueError(
                f"labeler: {type(self.labeler).__name__} answers {' or '.join(self.labeler.tasks)} queries, the "
                f"data is {data.task}; use for instance {fitting}"
            )
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("fast_dev_run: no query is made; public images get placeholder labels")
            data.public.set_labels(slice(None), placeholders(data.public.labels, data.num_classes))
            return
        self._group = ProcessGroup.of(trainer)
        self._place = self._folder(trainer)
        self._group.shared(functools.partial(self._open, data))
        if self._loaded is not None:
            self._restart_due = bool(self._loaded.get("restart_due", False))
            self._rounds_applied = int(self._loaded.get("rounds_applied", 0))
        due = min(self.rounds, 1 + self._epochs_before // self.epochs_per_round)
        for index in range(due):
            is_new = index >= self._rounds_applied
            self._run_round(trainer, pl_module, data, index)
            self._restart_due |= is_new and index > 0 and self.retrain
        self._epochs_before = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the student afresh where a round has just brought new labels."""
        if not self._restart_due:
            return
        restart = getattr(pl_module, "reinitialize", None)
        if restart is None:
            raise TypeError(
                f"retrain=True needs {type(pl_module).__name__}.reinitialize(), which draws fresh weights in "
                "place; define it, derive from pl_privknn.students.Student, or set retrain=False"
            )
        restart()
        trainer.strategy.setup_optimizers(trainer)
        self._restart_due = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log ε and the labels that this epoch used, then run the next round if one is due."""
        check_declared(self._metrics)
        for name, value in self._metrics.items():
            pl_module.log(name, value, on_epoch=True, rank_zero_only=False, sync_dist=False)
        if self.labeler is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        epochs_done = trainer.current_epoch + 1
        index, rest = divmod(epochs_done, self.epochs_per_round)
        if rest or not self._rounds_applied <= index < self.rounds or is_last_epoch(trainer):
            return
        self._run_round(trainer, pl_module, data_module(trainer), index)
        self._restart_due = self.retrain

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the run's folder to others; the ledger stays readable for reports."""
        if stage == "fit":
            self._loaded = None
            self._leave()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the run's folder to others."""
        self._leave()

    def _leave(self) -> None:
        if isinstance(self.labeler, JoinsRuns):
            self.labeler.leave_run()
        self._group.close()
        if self._run is not None:
            self._run.close()

    # ------------------------------------------------------------------ work

    def _folder(self, trainer: pl.Trainer) -> Path:
        if self.run_dir is not None or self._loaded is None:
            return self.run_dir or Path(trainer.log_dir or trainer.default_root_dir)
        run_id = self._loaded["run_id"]
        return resumed_folder(
            Path(self._loaded["run_dir"]),
            trainer.ckpt_path,
            lambda folder: stored_run_id(folder) == run_id,
        )

    def _open(self, data: PrivatePublicDataModule) -> None:
        assert self.labeler is not None
        if self._group.rank:
            return
        queries = self._queries(len(data.public))
        terms = RunTerms(
            plan=stated_plan(
                self.labeler,
                sum(queries),
                self._answers(queries),
                data.num_classes,
                rounds=sum(map(bool, queries)),
            ),
            public_examples=len(data.public),
            public_digest=digest_of(data.public),
            num_classes=data.num_classes,
            delta=self.delta,
            max_epsilon=self.max_epsilon,
            adjacency=self.adjacency,
            ledger_path=self.ledger_path,
            ledger_head_path=self.ledger_head_path,
            run_id=None if self._loaded is None else self._loaded["run_id"],
            description={"labeler": type(self.labeler).__name__, "queries": sum(queries)},
        )
        self._run = LabelRun(self._place, terms)

    def _queries(self, public_examples: int) -> list[int]:
        return [public_examples] * self.rounds if self.selects_all else self.queries_per_round

    def _answers(self, queries: list[int]) -> int:
        return sum(queries) if self.max_answers is None else min(self.max_answers, sum(queries))

    def _run_round(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, data: PrivatePublicDataModule, index: int
    ) -> None:
        """Round ``index`` on global rank 0, its answers on every rank."""
        take_part = functools.partial(self._take_part, trainer, pl_module, data, index)
        examples, labels, soft, self._metrics = self._group.shared(take_part)
        data.public.clear_labels()
        data.public.set_labels(examples, labels, soft)
        self._rounds_applied = index + 1

    def _take_part(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, data: PrivatePublicDataModule, index: int
    ) -> Any:
        """This process's part of a round: global rank 0 asks and pays, others search shards of their own, if any."""
        assert self.labeler is not None
        queries = self._queries(len(data.public))
        self.labeler.device = device_of(self.device, trainer.strategy.root_device)
        shard = shard_of(self.labeler, data, self._group, self.sharded, self.adjacency)
        if isinstance(self.labeler, ShardedLabeler):
            self.labeler.shard = shard
        if shard is not None:
            same_buffers(pl_module, self._group)
        labeling = LabelingRound(
            labeler=self.labeler,
            extractor=extractor_of(self.features[min(index, len(self.features) - 1)], pl_module),
            select=self.select,
            num_queries=queries[index],
            max_answers=self._answers(queries),
            query_batch_size=self.query_batch_size,
            seed=self.seed,
            predict=functools.partial(probabilities_of, pl_module),
            check=self._group.check,
            memory=self.memory,
        )
        if self._run is None:
            return labeling.follow(data, self._place)
        with rich_progress(index, self.rounds, self.progress) as progress:
            labeling.run(index, data, self._run.store, self._run.ledger_run, progress)
        labeling.end()
        examples, labels, soft = self._run.store.answers(index + 1)
        self._run.note_counts()
        self._run.tell_losses(len(examples))
        earlier = self._run.store.answers(index)[0]
        return examples, labels, soft, self._run.metrics(data.public.truth, examples, labels, earlier)
