"""The callback that queries a private teacher between epochs of ``trainer.fit``."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_choice, check_int
from pl_privknn._lightning import rank_zero_info, rank_zero_warn
from pl_privknn._processes import ProcessGroup
from pl_privknn._progress import progress_bars
from pl_privknn.callbacks.label_run import LabelRun
from pl_privknn.callbacks.labeling_arguments import (
    LabelingOptions,
    RoundFeatures,
    check_fits,
    check_schedule,
    check_student,
    data_module,
    device_of,
    extractor_of,
    features_of_rounds,
    is_last_epoch,
    lasting_extractor,
    placeholders,
    probabilities_of,
    public_facts,
    queries_of_rounds,
    take_columns,
)
from pl_privknn.callbacks.labeling_round import (
    MODELS,
    LabelingRound,
    ReleasedHead,
    beside_paid_releases,
    check_stated,
    labels_in_use,
    load_head,
    model_for,
    outcomes_alone,
    public_extractor,
    remark_of,
    same_buffers,
    shard_of,
)
from pl_privknn.callbacks.run_summary import add_run_report
from pl_privknn.callbacks.selection import FullSelection, RandomSelection, Selector
from pl_privknn.config import HasInitArguments, as_group
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages
from pl_privknn.features.backbone import undisturbed
from pl_privknn.features.base import Extractor
from pl_privknn.features.private_records import COMPARED, is_foreign, kept_apart
from pl_privknn.labelers.base import JoinsRuns, Labeler, SpendsBudget, stated_plan
from pl_privknn.privacy.budget import Budget, BudgetExceeded
from pl_privknn.privacy.files import resumed_folder, trainers_folder
from pl_privknn.privacy.holdout import PaidEvaluation, held_out, kept_figures, release_figures
from pl_privknn.privacy.mechanisms.base import READS_ALONE, Guarantee, noise_guarantee
from pl_privknn.privacy.public_rows import DrawnRows, KeptReleases
from pl_privknn.privacy.records import (
    check_evaluated,
    check_hyperparameters,
    check_owners,
    foreign_loader,
    foreign_reader,
)
from pl_privknn.privacy.redaction import redacted
from pl_privknn.privacy.run import StatesPrivacy, run_id_in
from pl_privknn.privacy.verify import RELEASES
from pl_privknn.students.losses import TASKS

_MOST_ROUNDS = 10**6  # each has its number of queries and its features


class PrivateLabeler(HasInitArguments, StatesPrivacy, pl.Callback):
    """Callback that queries a private teacher before the first epoch and after every ``epochs_per_round`` epochs.

    Each round extracts features of private and public images, picks queries among the public images, lets
    the labeler answer them, and writes the answers into the public dataset, where the student's next epoch
    finds them. The worst case of all rounds is stated in the ledger, and checked against the budget,
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
        budget: ε and δ, the unit of privacy and the neighbouring relation. A teacher without noise of its own uses
            the least that keeps all rounds within ε; every run ends before it exceeds ε.
        features: what turns images into vectors, one extractor a round, the last one repeated; the word
            ``"student"`` means the student's backbone, and a list within the list several kinds of
            features side by side. Default: HOG (of grey images up to 32 pixels a
            side) or :class:`~pl_privknn.features.PublicFeatures` (of all others) first, then the student. Modules and
            functions of others compute each vector from one image alone, or are refused before anything is planned;
            where they can't be traced the guarantee is conditional.
        selection: of each round's queries: :class:`~pl_privknn.callbacks.RandomSelection` (the default; examples
            never asked about), :class:`~pl_privknn.callbacks.FullSelection` (every unanswered example),
            :class:`~pl_privknn.callbacks.UncertainSelection` (those the student is least sure of),
            :class:`~pl_privknn.callbacks.ClusterSelection` (the centre of each cluster of public features; its
            cluster takes its answer, or noisy counts are smoothed over neighbouring clusters), or another subclass
            of :class:`~pl_privknn.callbacks.Selector`.
        evaluate: hold out a share of the private records, or persons, of which the teacher learns nothing, and
            release the confusion matrix of the released model on them when the training ends, at the labels' ε.
        released: model that the run releases: ``"student"``, ``"head"`` (the model that a teacher's releases make),
            ``"ensemble"`` (mean of their probabilities), or ``"auto"``: the ensemble where both agree on public
            examples, else the head; the student where there is no head.
        run_dir: the run's folder; by default the trainer's log folder, or a new one in ``runs/`` where it has none.
            Repeating a run in the folder of an interrupted one continues it.
        options: rarely used settings.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> from pl_privknn import Budget, PrivateLabeler, ReverseKNN
        >>> labeling = PrivateLabeler(ReverseKNN(k=1), rounds=2, queries_per_round=500, budget=Budget(epsilon=1.0))
        >>> labeling.queries_per_round, labeling.labeler.mechanism(10).scale
        ([500, 500], 2.0)
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
        selection: Selector | None = None,
        budget: Budget = Budget(),
        released: str = "student",
        evaluate: PaidEvaluation | None = None,
        run_dir: str | Path | None = None,
        options: LabelingOptions = LabelingOptions(),
    ) -> None:
        self.budget = as_group("budget", budget, Budget())
        self.options = as_group("options", options, LabelingOptions())
        self.labeler = labeler
        self.rounds = check_int("rounds", rounds, maximum=_MOST_ROUNDS)
        self.epochs_per_round = check_int("epochs_per_round", epochs_per_round)
        self.queries_per_round = queries_of_rounds(queries_per_round, self.rounds)
        self.max_answers = None if max_answers is None else check_int("max_answers", max_answers)
        self.features = features_of_rounds(features)
        self.select = RandomSelection() if selection is None else selection
        if not isinstance(self.select, Selector):
            raise ValueError(f"selection={selection!r} must be a Selector, such as ClusterSelection()")
        self.selects_all = isinstance(self.select, FullSelection)
        self.run_dir = run_dir
        self._hand_budget()
        if labeler is not None:
            check_fits(
                labeler, self.budget.adjacency, self.features, self.queries_per_round, self.budget.unit
            )
        self.evaluate = None if evaluate is None else as_group("evaluate", evaluate, PaidEvaluation())
        if self.evaluate is not None and self.options.ledger_path is not None:
            raise ValueError(
                "evaluate: the hold-out is charged in parallel with one run; leave options.ledger_path out, or "
                "evaluate=None"
            )
        #: Figures of the hold-out, their errors and their ε, once released.
        self.accuracy: dict[str, Any] = {}
        self._held: tuple[LabeledImages, Tensor | None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._private: Callable[[], LabeledImages | None] = _no_records
        self.released = check_choice("released", released, (*MODELS, "auto"))
        self._place = Path()
        self._conditions: tuple[str, ...] = ()
        self._stated: tuple[str, ...] = ()
        self._run: LabelRun | None = None
        self._metrics: dict[str, float] = {}
        self._loaded: dict[str, Any] | None = None
        self._epochs_before = 0
        self._rounds_applied = 0
        self._restart_due = False
        self._group = ProcessGroup()

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check trainer and data module."""
        if stage == "fit":
            add_run_report(trainer)
        if stage != "fit" or self.labeler is None:
            return
        check_schedule(trainer)
        data = data_module(trainer)
        check_hyperparameters(pl_module, data, data.private)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the number of epochs before the checkpoint."""
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
        self._epochs_before = int(progress.get("current", {}).get("processed", 0))

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the run's folder and progress; the labels are in the folder."""
        if self._led is None:
            return {}
        progress = {"rounds_applied": self._rounds_applied, "restart_due": self._restart_due}
        return {**self._led.state(), **progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the folder of the checkpoint's run; ``on_fit_start`` continues it."""
        self._loaded = state_dict or None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """State the plan, then run or restore the rounds that are due before the next epoch."""
        if self.labeler is None:
            return
        data = data_module(trainer)
        self._hand_budget(data)
        self._private = weakref.ref(data.private)
        if data.task not in self.labeler.tasks:
            fitting = "PrivateKNN"
            if data.task == "multilabel":
                fitting = "PrivateKNN(task='multilabel')"
            raise ValueError(
                f"labeler: {type(self.labeler).__name__} answers {' or '.join(self.labeler.tasks)} queries, the "
                f"data is {data.task}; use for instance {fitting}"
            )
        prior = self.options.prior_of(data.num_classes)
        if prior is not None and len(prior) != data.num_classes:
            raise ValueError(f"class_prior: {len(prior)} shares, the data has {data.num_classes} classes")
        if prior is not None and data.task == "multilabel":
            raise ValueError("class_prior, balanced: attributes have no shares of classes; leave both out")
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("fast_dev_run: no query is made; public examples get placeholder labels")
            data.public.set_labels(slice(None), placeholders(data.public.labels, data.num_classes))
            return
        check_student(trainer, pl_module, data)
        self._group = ProcessGroup.of(trainer)
        self._place = self._folder(trainer)
        if self.budget.unit == "person":
            check_owners(data.private_groups, len(data.private))
        place, run_id, reports = self._group.shared(functools.partial(self._open, trainer, pl_module, data))
        if self._group.rank:
            self._run = LabelRun.followed(place, run_id)
            self._run.hear(reports)
        self._hold_out(data)
        if data.pays_for_public:
            self._draw_public(data)
        if self._loaded is not None:
            self._restart_due = bool(self._loaded.get("restart_due", False))
            self._rounds_applied = int(self._loaded.get("rounds_applied", 0))
        due = min(self.rounds, 1 + self._epochs_before // self.epochs_per_round)
        for index in range(due):
            is_new = index >= self._rounds_applied
            self._label(trainer, pl_module, data, index)
            self._restart_due |= is_new and index > 0 and self.options.retrain
        self._epochs_before = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reinitialise the student where a round has just added labels."""
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
        for name, value in self._metrics.items():
            pl_module.log(name, value, on_epoch=True, rank_zero_only=False, sync_dist=False)
        if self.labeler is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        epochs_done = trainer.current_epoch + 1
        index, rest = divmod(epochs_done, self.epochs_per_round)
        if rest or not self._rounds_applied <= index < self.rounds or is_last_epoch(trainer):
            return
        self._label(trainer, pl_module, data_module(trainer), index)
        self._restart_due = self.options.retrain

    def _hold_out(self, data: PrivatePublicDataModule) -> None:
        """Hold out a share of the private records, drawn by the run's coins."""
        if self.evaluate is not None and (self._group.size > 1 or data.private_in_shards):
            raise ValueError(
                "evaluate: the accuracy is that of one process, on one table; use devices=1 and such data, or "
                "evaluate=None"
            )
        if (run := self._led) is None or self._group.size > 1:
            return
        owners = data.private_groups if self.budget.unit == "person" else None
        numbers = torch.arange(len(data.private)) if owners is None else owners
        begun = run.num_charges > len(data.names_plan(self.budget))
        held = redacted(
            held_out, self.evaluate, self._place, run.run_id, numbers, begun, data.private_as_read
        )
        self.accuracy = {} if held is None else kept_figures(self._place)
        if held is not None:
            out, restore = data.hold_out(held)
            self._undo.append(restore)
            self._held = out, None if owners is None else owners[held]

    def _draw_public(self, data: PrivatePublicDataModule) -> None:
        """Pay for public examples and draw them, or load the ones that the run has drawn."""

        def drawn() -> DrawnRows:
            assert self.labeler is not None
            assert self._run is not None
            path, source = self._place / RELEASES, self.labeler.noise_source
            release = KeptReleases(path, self._run.ledger_run, self.budget, source)
            return redacted(data.draw_public, self.budget, release)

        data.take_public(self._group.from_first(drawn), None if self._group.rank else self._place)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to test on private records; take the columns of the run that is tested."""
        take_columns(trainer, self.asked_dir)
        check_evaluated("test_dataloader", trainer.test_dataloaders, self._private())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to validate on private records by themselves; the data module refuses them within a fit."""
        if trainer.state.fn == "validate":
            take_columns(trainer, self.asked_dir)
            check_evaluated("val_dataloader", trainer.val_dataloaders, self._private())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Release the figures of the hold-out, once all rounds are done."""
        if self._held is None or (run := self._led) is None or self._rounds_applied < self.rounds:
            return
        assert self.labeler is not None
        data, head = data_module(trainer), self.load_head(self._place)
        outputs = TASKS[data.task]
        model = model_for(self.released, head, pl_module, data.public, outputs)
        outcomes, conditions = redacted(outcomes_alone, model, head, pl_module, self._held[0], outputs)
        self.accuracy = redacted(
            release_figures,
            self._place,
            run.run_id,
            outcomes,
            self._held[1],
            classes=data.class_names if data.task == "multiclass" else None,
            budget=dataclasses.replace(self.budget, epsilon=self.report().epsilon),
            noise=self.labeler.noise_source,
            conditions=tuple(dict.fromkeys((*self._stated, *conditions))),
            before=data.names_plan(self.budget),
        )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release the run's folder; the ledger stays readable for reports."""
        if stage == "fit":
            self._loaded = None
            self._leave()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Release the run's folder."""
        self._leave()

    def _leave(self) -> None:
        self._held = None
        while self._undo:
            self._undo.pop()()
        if isinstance(self.labeler, JoinsRuns):
            self.labeler.leave_run()
        self._group.close()
        if self._led is not None:
            self._led.close()

    # ------------------------------------------------------------------ work

    def _hand_budget(self, data: PrivatePublicDataModule | None = None) -> None:
        """Let the teacher set its noise from the budget, at each start of a run: callbacks may share a teacher.

        Args:
            data: whose public examples may take a share of the budget.
        """
        if isinstance(self.labeler, SpendsBudget):
            asking = self.rounds if self.selects_all else sum(map(bool, self.queries_per_round))
            self.labeler.take_budget(self.budget if data is None else data.budget_left(self.budget), asking)

    def _folder(self, trainer: pl.Trainer) -> Path:
        if self.asked_dir is not None:
            return self.asked_dir
        if self._loaded is None:
            place = trainer.log_dir or trainer.default_root_dir  # asked for by all processes together
            name = type(trainer.lightning_module).__name__
            found = None if self._group.rank else trainers_folder(trainer, place, name)
            return self._group.broadcast(found) if self._group.size > 1 else found or Path(place)
        return resumed_folder(self._loaded, trainer.ckpt_path, run_id_in)

    def _open(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, data: PrivatePublicDataModule
    ) -> tuple[Path, str, Any]:
        """State the plan, or continue the run; returns the run's folder, its id and its reports."""
        assert self.labeler is not None
        queries = self._queries(len(data.public))
        self._conditions = self._conditions_of(trainer, pl_module, data, queries)
        if self._group.rank:
            return self._place, "", None
        for condition in self._conditions:
            rank_zero_warn(f"features: can't be traced, so that the guarantee is conditional: {condition}")
        reader = None if data.reads_alone else foreign_reader(data.private) or foreign_loader(data)
        stated = (
            *self._conditions,
            *data.conditions,
            *([] if reader is None else [READS_ALONE.format(reader)]),
        )
        if self.evaluate is not None and self.released != "head":
            with undisturbed(pl_module, torch.device(pl_module.device)):
                some = data.public.images(torch.arange(min(COMPARED, len(data.public))))
                stated += kept_apart(pl_module, some)[1]
        self._run = self._with_plan(data, stated)
        named = () if data.names is None else stated
        if self._conditions or named:  # a resumed run keeps the plan that it has
            check_stated((*self._conditions, *named), self._run.ledger_run.report().guarantee.reason)
        rank_zero_info(f"run: {self._place}")
        return self._place, self._run.run_id, self._run.reports(exact=False)

    def open_run(self, data: PrivatePublicDataModule, folder: str | Path) -> LabelRun:
        """Open the run in a folder with its whole plan, before a trainer continues it there."""
        self._hand_budget(data)
        data.setup("validate")
        self._place = Path(folder)
        return self._with_plan(data, data.conditions)

    def _with_plan(self, data: PrivatePublicDataModule, stated: tuple[str, ...]) -> LabelRun:
        """The run, opened or continued, with its plan and the conditions of its guarantee."""
        assert self.labeler is not None
        queries = self._queries(len(data.public))
        self._stated = stated
        guarantee = Guarantee("conditional", stated) if stated else Guarantee()
        public = noise_guarantee(self.labeler.noise_source)
        before = [charge.with_guarantee(public) for charge in data.public_plan(self.budget)]
        own = stated_plan(
            self.labeler, sum(queries), self._answers(queries), data.num_classes, sum(map(bool, queries))
        )
        try:
            return LabelRun(
                self._place,
                [charge.with_guarantee(guarantee) for charge in [*before, *own]],
                {"labeler": type(self.labeler).__name__, "queries": sum(queries)},
                public_facts(data),
                self._loaded,
                budget=self.budget,
                ledger_path=self.options.ledger_path,
            )
        except BudgetExceeded as error:
            raise beside_paid_releases(error, self.labeler, before, own) from None

    def _conditions_of(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        data: PrivatePublicDataModule,
        queries: list[int],
    ) -> tuple[str, ...]:
        """Conditions of foreign extractors; refuses one that mixes images, before anything is planned."""
        place = device_of(self.options.device, trainer.strategy.root_device)
        asking = {min(index, len(self.features) - 1) for index, count in enumerate(queries) if count}
        used = [extractor_of(self.features[index], pl_module) for index in sorted(asking)]
        tried = [public_extractor(extractor, data, place) for extractor in used if is_foreign(extractor)]
        return tuple(dict.fromkeys(condition for _, conditions in tried for condition in conditions))

    def _queries(self, public_examples: int) -> list[int]:
        return [public_examples] * self.rounds if self.selects_all else self.queries_per_round

    def _answers(self, queries: list[int]) -> int:
        return sum(queries) if self.max_answers is None else min(self.max_answers, sum(queries))

    def _label(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, data: PrivatePublicDataModule, index: int
    ) -> None:
        """Run round ``index``: global rank 0 asks, and every rank gets the answers."""
        take_part = functools.partial(self._take_part, trainer, pl_module, data, index)
        examples, labels, soft, self._metrics, reports = self._group.shared(take_part)
        if self._led is None and self._run is not None:
            self._run.hear(reports)
        data.public.clear_labels()
        data.public.set_labels(examples, labels, soft)
        self._rounds_applied = index + 1

    def _take_part(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, data: PrivatePublicDataModule, index: int
    ) -> Any:
        """Run this process's part of a round: global rank 0 asks and charges, others search their shards, if any."""
        assert self.labeler is not None
        queries, options = self._queries(len(data.public)), self.options
        shard = shard_of(
            self.labeler, data, self._group, options.sharded, self.budget.adjacency, self.budget.unit
        )
        if shard is not None:
            same_buffers(pl_module, self._group)
        labeling = LabelingRound(
            class_prior=options.prior_of(data.num_classes),
            labeler=self.labeler,
            extractor=extractor_of(self.features[min(index, len(self.features) - 1)], pl_module),
            select=self.select,
            num_queries=queries[index],
            max_answers=self._answers(queries),
            query_batch_size=options.query_batch_size,
            seed=options.seed,
            predict=functools.partial(probabilities_of, pl_module),
            check=self._group.check if self._group.size > 1 else None,
            memory=options.memory,
            unit=self.budget.unit,
            shard=shard,
            device=device_of(options.device, trainer.strategy.root_device),
            conditions=self._conditions,
        )
        assert self._run is not None
        run = self._run
        with progress_bars(options.progress and run.leads, f"round {index + 1}/{self.rounds}: ") as progress:
            labeling.run_round(index, data, run, progress)
        if not run.leads:
            return None
        examples, labels, soft = run.stored.answers(index + 1)
        prior = options.prior_of(data.num_classes)
        labels, soft = labels_in_use(self.labeler, labels, soft, prior, is_first=index == 0)
        run.warn_lost(len(examples))
        earlier = run.stored.answers(index)[0]
        figures = run.metrics(data.public.truth, examples, labels, earlier)
        return examples, labels, soft, {**self.privacy_metrics(), **figures}, run.reports()

    # ------------------------------------------------------------------ what the run says

    @property
    def _led(self) -> LabelRun | None:
        """Run of the process that has the run's file; None elsewhere and before the fit."""
        return self._run if self._run is not None and self._run.leads else None

    @property
    def stated_run(self) -> LabelRun | None:
        """The run, once the fit has started."""
        return self._run

    @property
    def metrics(self) -> dict[str, float]:
        """Logged metrics: ``privacy/…`` and ``labels/…``."""
        return dict(self._metrics)

    def privacy_summary(self) -> dict[str, Any] | None:
        """Privacy figures of the run for a summary, in plain types; None before the fit."""
        if (run := self._led) is None:
            return None
        return {
            **run.summary(),
            **self.label_counts(),
            **self.accuracy,
            "label_accuracy": self.metrics.get("labels/accuracy"),
            "label_accuracy_last_round": self.metrics.get("labels/accuracy_last_round"),
            "labeler": type(self.labeler).__name__,
            **({"remark": remark} if (remark := remark_of(self._place, self.labeler)) else {}),
        }

    def load_head(self, folder: Path) -> ReleasedHead | None:
        """Model of the releases, from a run's folder; None where there is none."""
        extractor = lasting_extractor(self.features)
        if self.labeler is None or extractor is None:
            return None
        return load_head(folder, self.labeler, extractor)

    @property
    def run_id(self) -> str | None:
        """Id of the run in its ledger, once the fit has started, on global rank 0."""
        return None if self._led is None else self._led.run_id

    def label_counts(self) -> dict[str, int]:
        """Numbers of queries: queried, answered, refused, lost to a crash."""
        return {} if self._led is None else self._led.stored.counts()

    def asked_examples(self) -> list[int]:
        """Public examples of all rounds so far, in the order in which they were asked."""
        return [] if self._led is None else self._led.stored.all_selected()


def _no_records() -> None:
    """Placeholder for a weak reference before the fit; returns None."""
