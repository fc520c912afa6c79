"""``privknn fit / validate / test / predict``: LightningCLI with the project's classes known by name."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jsonargparse import ActionConfigFile, ArgumentError, Namespace
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_int
from pl_privknn._lightning import rank_zero_only
from pl_privknn.baselines import NoisySGD
from pl_privknn.callbacks import PrivateLabeler, PrivateTraining, RunReport
from pl_privknn.callbacks.checkpoints import DurableCheckpointIO
from pl_privknn.cli.common import importable, mistake, shown_text
from pl_privknn.cli.quiet import ParameterCount, quietly
from pl_privknn.cli.run_folder import keep_last_checkpoint, new_folder, run_loggers
from pl_privknn.cli.training_parser import TrainingParser
from pl_privknn.cli.training_words import check_files, expand_resume, help_topic, values_of
from pl_privknn.comparison.worker import INTERRUPTED
from pl_privknn.config import ConfigurationError, known_classes, one_line
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.store import FolderLock
from pl_privknn.report import write_report

_MISCONFIGURED = pl.both("utilities.exceptions.MisconfigurationException")

known_classes()  # YAML may name them without a module path


class PrivKNNCLI(LightningCLI):
    """LightningCLI with a ``labeling`` section (:class:`PrivateLabeler`) and a folder for each run."""

    #: The trainer's methods that are offered. Each takes a second to describe, so a command describes itself alone.
    methods: ClassVar[tuple[str, ...]] = ("fit", "validate", "test", "predict")
    #: Whose options help shows: the toolkit's, or the trainer's.
    topic: ClassVar[str | None] = None
    #: The command at work, for who has to say where it stopped.
    at_work: ClassVar[PrivKNNCLI | None] = None

    @classmethod
    def run_words(cls, words: list[str]) -> None:
        """Run the command that the words name."""
        cls(
            model_class=pl.package_of().LightningModule,
            datamodule_class=pl.package_of().LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=_SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"max_epochs": 20, "logger": None},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "privknn", "exit_on_error": False, words[0]: {"exit_on_error": False}},
            args=words,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser with an option for files; see :meth:`LightningCLI.init_parser`."""
        parser = TrainingParser(dump_header=[f"pytorch_lightning=={pl.package_of().__version__}"], **kwargs)
        parser.topic = self.topic
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="a file with configuration, YAML or JSON"
        )
        return parser

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """The trainer's methods that are offered, with the arguments that they fill in themselves."""
        return {
            name: {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
            for name in cls.methods
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the ``labeling`` section, the run's folder, and what the data says of the network."""
        parser.add_lightning_class_args(PrivateLabeler, "labeling")
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="folder of the run; runs/NAME/NUMBER by default, or NAME/NUMBER in --trainer.default_root_dir",
        )
        parser.add_argument(
            "--attach_ledger",
            type=bool,
            default=False,
            help="attach ledger and report to a W&B run as artifacts",
        )
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.link_arguments("data.task", "model.init_args.task", apply_on="instantiate")
        parser.link_arguments(
            "data.image_shape", "model.init_args.in_channels", lambda shape: shape[0], apply_on="instantiate"
        )
        parser.link_arguments(
            "data.image_shape", "model.init_args.image_size", lambda shape: shape[-1], apply_on="instantiate"
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line and its files.

        Raises:
            ConfigurationError: for arguments that are not known or have a bad value.
        """
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, ArithmeticError) as error:
            words = args if isinstance(args, list) else []
            files = ", ".join(values_of("config", words))
            options = [] if not words else [a.dest for a in self._subcommand_parsers[words[0]]._actions]
            text = one_line(error, options).replace("Problems parsing config", f"--config {files}")
            if text.startswith("the following arguments are required") and not files:
                text += "; give --config FILE, as in --config configs/digits_reverse_knn.yaml"
            see = "" if "did you mean" in text else f"; see privknn {words[0] if words else 'fit'} --help"
            raise ConfigurationError(f"{text}{see}") from error
        seed = self.config[self.config.subcommand].seed_everything
        if not isinstance(seed, bool):
            check_int("seed_everything", seed, minimum=0, maximum=2**32 - 1)

    def instantiate_classes(self) -> None:
        """Make the trainer, the data, the student and the labeler.

        Raises:
            ConfigurationError: for arguments that their constructors refuse.
        """
        try:
            super().instantiate_classes()
        except (ArgumentError, ArithmeticError, ValueError, TypeError, *_MISCONFIGURED) as error:
            raise ConfigurationError(one_line(error)) from error

    def _parse_ckpt_path(self) -> None:
        """Leave the command line as it was given.

        Lightning would let the checkpoint's hyper-parameters win over it without a word.
        """

    def before_instantiate_classes(self) -> None:
        """Give the run its folder, and the loggers and checkpoints their place in it."""
        config = self._subconfig()
        folder = Path(config.run_dir) if config.run_dir else new_folder(config)
        config.run_dir = str(folder)
        type(self).at_work = self
        if (
            self.subcommand == "fit"
            and not config.trainer.fast_dev_run
            and getattr(rank_zero_only, "rank", 0) == 0
        ):
            self._lock = FolderLock(folder, shared=True)  # before anything in the folder is touched
        config.trainer.default_root_dir = config.trainer.default_root_dir or str(folder)
        if self.subcommand != "fit":
            # An evaluation must not start the run's metrics.csv anew.
            config.trainer.logger = config.trainer.logger or False
        elif config.trainer.logger is not False and not config.trainer.fast_dev_run:
            config.trainer.logger = run_loggers(config.trainer.logger, folder)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer, with a checkpoint after every epoch (and its query) and a report at the end."""
        self.trainer_class = pl.package_of(self.model, self.datamodule).Trainer
        trainer = super().instantiate_trainer(**kwargs)
        folder = Path(self._subconfig().run_dir)
        self.run_report = RunReport(folder, show=False)  # once, after the test
        trainer.callbacks.append(self.run_report)  # type: ignore[attr-defined]
        ParameterCount.stand_in(trainer)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            keep_last_checkpoint(trainer, folder)
        if type(trainer.strategy.checkpoint_io) in pl.both("plugins.io.TorchCheckpointIO"):
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        return trainer

    def before_fit(self) -> None:
        """Keep the metrics of the interrupted part of a resumed run: the CSV logger starts its file anew."""
        folder = Path(self._subconfig().run_dir)
        for owner in (*self.trainer.callbacks, self.model):  # type: ignore[attr-defined]
            if isinstance(owner, PrivateLabeler | NoisySGD | PrivateTraining) and owner.run_dir is None:
                owner.run_dir = folder  # a copied folder goes on in itself
        metrics = folder / "metrics.csv"
        if metrics.exists():
            number = len(list(folder.glob("metrics.*.csv")))
            metrics.rename(folder / f"metrics.{number}.csv")

    def after_fit(self) -> None:
        """Test the last epoch's student, then print the table and, last, the run's folder."""
        if self.trainer.fast_dev_run or self.trainer.interrupted:  # type: ignore[attr-defined]
            return
        if isinstance(self.datamodule, PrivatePublicDataModule) and len(self.datamodule.test):
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            self.run_report.print_table()
            ledger = _ledger_of(self.trainer, self.model) if self._subconfig().attach_ledger else None
            _finish_wandb(self.trainer, self.run_report.summary, Path(self._subconfig().run_dir), ledger)
            print(self._subconfig().run_dir)

    def _subconfig(self) -> Namespace:
        return self.config.get(str(self.subcommand), self.config)


class _SaveRunConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder; an evaluation leaves that of the training alone."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


def run_training(words: Sequence[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        words: the subcommand and its arguments. ``fit --resume DIR`` stands for the config, folder and last
            checkpoint of an interrupted run.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: for arguments, configuration or a checkpoint that can't be used.
    """
    words, topic = help_topic(words)
    expanded = expand_resume(list(words))
    check_files(values_of("config", expanded) + values_of("c", expanded))
    cli: type[PrivKNNCLI] = type("PrivKNNCLI", (PrivKNNCLI,), {"methods": (words[0],), "topic": topic})
    try:
        with quietly(words[0]), importable(values_of("config", expanded) + values_of("c", expanded)):
            cli.run_words(expanded)
    except (KeyboardInterrupt, SystemExit) as stop:
        if (status := _interrupted(stop, cli.at_work)) is None:
            raise
        return status
    except _MISCONFIGURED as error:
        raise ConfigurationError(one_line(error)) from error
    except Exception as error:
        if mistake(error) is None and _restoring(error):
            checkpoint = ", ".join(values_of("ckpt_path", expanded))
            # A network that does not fit is told in full; torch's advice on unsafe files is not for users.
            why = shown_text(one_line(error)) if type(error) is RuntimeError else type(error).__name__
            raise ConfigurationError(
                f"ckpt_path={checkpoint} can't be restored ({why}); give another checkpoint, of the same student"
            ) from error
        raise
    return 0


def _interrupted(stop: BaseException, cli: PrivKNNCLI | None) -> int | None:
    """Say how a run that was stopped by Ctrl-C goes on; None for an end of another kind."""
    trainer = getattr(cli, "trainer", None)
    if isinstance(stop, SystemExit) and not getattr(trainer, "interrupted", False):
        return None
    folder = None if cli is None else Path(cli._subconfig().run_dir)
    if (
        cli is not None
        and cli.subcommand == "fit"
        and folder is not None
        and (folder / "config.yaml").is_file()
    ):
        text = f"interrupted; what was paid for is kept. Continue with: privknn fit --resume {folder}"
    else:
        text = "interrupted before anything was asked; the same command starts afresh"
    print(f"privknn: {text}", file=sys.stderr)
    return INTERRUPTED


def _restoring(error: Exception) -> bool:
    """Whether an error came up while a checkpoint was read."""
    files = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return "checkpoint_connector.py" in files


def _ledger_of(trainer: pl.Trainer, model: pl.LightningModule) -> Path | None:
    """The ledger of the run's labeler, or of a module that trains on the private records itself."""
    for owner in (*trainer.callbacks, model):  # type: ignore[attr-defined]
        if isinstance(ledger := getattr(owner, "ledger", None), Ledger):
            return ledger.path
    return None


def _finish_wandb(trainer: pl.Trainer, summary: dict[str, Any], folder: Path, ledger: Path | None) -> None:
    """Put the plain figures into the summary of a W&B run and close it, so that its file is complete."""
    for logger in trainer.loggers:
        if type(logger).__name__ == "WandbLogger":
            figures = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
            logger.experiment.summary.update(figures)  # type: ignore[attr-defined]
            if ledger is not None:
                _attach(logger.experiment, "ledger", ledger, "ledger.sqlite")  # type: ignore[attr-defined]
                _attach(logger.experiment, "report", write_report(folder), "report.html")  # type: ignore[attr-defined]
            logger.experiment.finish()  # type: ignore[attr-defined]


def _attach(run: Any, kind: str, file: Path, name: str) -> None:
    """Attach a file of released things alone, such as the ledger, with which a reader of the run can audit its ε."""
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    artifact.add_file(str(file), name=name)
    run.log_artifact(artifact)
