"""``privknn fit / validate / test / predict``: LightningCLI with the project's classes known by name."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
from jsonargparse import ActionConfigFile, ArgumentError, Namespace
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from pl_privknn._checks import check_int
from pl_privknn.baselines import NoisySGD
from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.callbacks.checkpoints import DurableCheckpointIO, usable_checkpoint
from pl_privknn.cli.errors import mistake, shown_text
from pl_privknn.configuration import (
    ConfigurationError,
    ReadsFlatArguments,
    known_classes,
    one_line,
    strict_yaml,
)
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.ledger.run_folder import FolderLock

known_classes()  # YAML may name them without a module path
strict_yaml()

_CHECKPOINT = Path("checkpoints") / "last.ckpt"


class _Parser(LightningArgumentParser, ReadsFlatArguments):
    """Lightning's parser, which reads arguments of groups by themselves too."""


class PrivKNNCLI(LightningCLI):
    """LightningCLI with a ``labeling`` section (:class:`PrivateLabeler`) and a folder for each run."""

    #: The trainer's methods that are offered. Each takes a second to describe, so a command describes itself alone.
    methods: ClassVar[tuple[str, ...]] = ("fit", "validate", "test", "predict")

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser with an option for files; see :meth:`LightningCLI.init_parser`."""
        parser = _Parser(dump_header=[f"pytorch_lightning=={pl.__version__}"], **kwargs)
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
            "--run_dir", type=str | None, default=None, help="folder of the run; runs/NAME/NUMBER by default"
        )
        parser.add_argument(
            "--attach_ledger", type=bool, default=False, help="attach the ledger to a W&B run as an artifact"
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
            files = ", ".join(_values_of("config", words))
            text = one_line(error).replace("Problems parsing config", f"--config {files}")
            raise ConfigurationError(f"{text}; see privknn {words[0] if words else 'fit'} --help") from error
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
        except (ArgumentError, ArithmeticError, ValueError, TypeError, MisconfigurationException) as error:
            raise ConfigurationError(one_line(error)) from error

    def _parse_ckpt_path(self) -> None:
        """Leave the command line as it was given.

        Lightning would let the checkpoint's hyper-parameters win over it without a word.
        """

    def before_instantiate_classes(self) -> None:
        """Give the run its folder, and the loggers and checkpoints their place in it."""
        config = self._subconfig()
        folder = Path(config.run_dir) if config.run_dir else _new_folder(_name_of(config))
        config.run_dir = str(folder)
        if (
            self.subcommand == "fit"
            and not config.trainer.fast_dev_run
            and getattr(rank_zero_only, "rank", 0) == 0
        ):
            self._lock = FolderLock(folder, shared=True)  # before anything in the folder is touched
        config.trainer.default_root_dir = str(folder)
        if self.subcommand != "fit":
            # An evaluation must not start the run's metrics.csv anew.
            config.trainer.logger = config.trainer.logger or False
        elif config.trainer.logger is not False and not config.trainer.fast_dev_run:
            config.trainer.logger = _loggers(config.trainer.logger, folder)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer, with a checkpoint after every epoch (and its query) and a report at the end."""
        trainer = super().instantiate_trainer(**kwargs)
        folder = Path(self._subconfig().run_dir)
        self.run_report = RunReport(folder)
        trainer.callbacks.append(self.run_report)  # type: ignore[attr-defined]
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _keep_last_checkpoint(trainer, folder)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        return trainer

    def before_fit(self) -> None:
        """Keep the metrics of the interrupted part of a resumed run: the CSV logger starts its file anew."""
        folder = Path(self._subconfig().run_dir)
        for owner in (*self.trainer.callbacks, self.model):  # type: ignore[attr-defined]
            if isinstance(owner, PrivateLabeler | NoisySGD) and owner.run_dir is None:
                owner.run_dir = folder  # a copied folder goes on in itself
        # The logger warns that it will delete the earlier file, which is put aside here.
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
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
            _print_table(self.run_report.table())
            ledger = _ledger_of(self.trainer, self.model) if self._subconfig().attach_ledger else None
            _finish_wandb(self.trainer, self.run_report.summary, ledger)
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
    # Said of Lightning's own workings, not of the user's run.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)` is deprecated")
    expanded = _expand_resume(list(words))
    cli = type("PrivKNNCLI", (PrivKNNCLI,), {"methods": (words[0],)})
    try:
        cli(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=_SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"max_epochs": 20, "logger": None},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={
                "prog": "privknn",
                "exit_on_error": False,
                words[0]: {"exit_on_error": False},
            },
            args=expanded,
        )
    except MisconfigurationException as error:
        raise ConfigurationError(one_line(error)) from error
    except Exception as error:
        if mistake(error) is None and _restoring(error):
            checkpoint = ", ".join(_values_of("ckpt_path", expanded))
            # A network that does not fit is told in full; torch's advice on unsafe files is not for users.
            why = shown_text(one_line(error)) if type(error) is RuntimeError else type(error).__name__
            raise ConfigurationError(
                f"ckpt_path={checkpoint} can't be restored ({why}); give another checkpoint, of the same student"
            ) from error
        raise
    return 0


def _restoring(error: Exception) -> bool:
    """Whether an error came up while a checkpoint was read."""
    files = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return "checkpoint_connector.py" in files


def _values_of(option: str, words: list[str]) -> list[str]:
    """What the command line gives for an option, for messages."""
    found = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-") == option:
            found += [value] if equals else words[place + 1 : place + 2]
    return found


def _expand_resume(words: list[str]) -> list[str]:
    if "--resume" not in words:
        return words
    place = words.index("--resume")
    if place + 1 >= len(words):
        raise FileNotFoundError("--resume needs the folder of the run to continue")
    folder = Path(words[place + 1])
    config = folder / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"--resume {folder}: there is no config.yaml; give the folder of a run")
    resumed = [words[0], "--config", str(config), "--run_dir", str(folder)]
    if (checkpoint := usable_checkpoint(folder / _CHECKPOINT)) is not None:
        resumed += ["--ckpt_path", str(checkpoint)]
    return resumed + words[1:place] + words[place + 2 :]


def _name_of(config: Namespace) -> str:
    """The stem of the first config file, or the student's name where there is none."""
    files = [str(path) for path in (config.get("config") or [])]
    if files:
        return Path(files[0]).stem
    return str(config.model.class_path).rsplit(".", 1)[-1]


def _new_folder(name: str) -> Path:
    """``runs/NAME/NUMBER`` with the first number that is free."""
    number = 0
    while True:
        folder = Path("runs") / name / str(number)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def _loggers(chosen: Any, folder: Path) -> list[Namespace]:
    """The CSV logger, whose file every run leaves, and those that the user chose, all in the run's folder."""
    csv = Namespace(
        class_path="pytorch_lightning.loggers.CSVLogger",
        init_args=Namespace(
            save_dir=str(folder), name="", version="", prefix="", flush_logs_every_n_steps=100
        ),
    )
    others = [] if chosen in (None, True) else chosen if isinstance(chosen, list) else [chosen]
    for logger in others:
        arguments = logger.get("init_args")
        if arguments is not None and str(arguments.get("save_dir")) in (".", "None"):
            arguments.save_dir = str(folder)
    return [csv, *[logger for logger in others if "CSVLogger" not in logger.class_path]]


def _keep_last_checkpoint(trainer: pl.Trainer, folder: Path) -> None:
    """Make the trainer's own default checkpoint one that a resume can rely on; a user's stays as it is."""
    for place, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        if type(callback) is ModelCheckpoint and callback.dirpath is None and callback.monitor is None:
            trainer.callbacks[place] = ModelCheckpoint(  # type: ignore[attr-defined]
                dirpath=folder / _CHECKPOINT.parent,
                filename=_CHECKPOINT.stem,
                enable_version_counter=False,
                save_on_train_epoch_end=True,
            )


def _ledger_of(trainer: pl.Trainer, model: pl.LightningModule) -> Path | None:
    """The ledger of the run's labeler, or of a module that trains on the private records itself."""
    for owner in (*trainer.callbacks, model):  # type: ignore[attr-defined]
        if isinstance(ledger := getattr(owner, "ledger", None), Ledger):
            return ledger.path
    return None


def _finish_wandb(trainer: pl.Trainer, summary: dict[str, Any], ledger: Path | None) -> None:
    """Put the plain figures into the summary of a W&B run and close it, so that its file is complete."""
    for logger in trainer.loggers:
        if type(logger).__name__ == "WandbLogger":
            figures = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
            logger.experiment.summary.update(figures)  # type: ignore[attr-defined]
            if ledger is not None:
                _attach(logger.experiment, ledger)  # type: ignore[attr-defined]
            logger.experiment.finish()  # type: ignore[attr-defined]


def _attach(run: Any, ledger: Path) -> None:
    """Attach the ledger (parameters and numbers of releases) so that a reader of the run can audit its ε."""
    import wandb

    artifact = wandb.Artifact(f"ledger-{run.id}", type="ledger")
    artifact.add_file(str(ledger), name="ledger.sqlite")
    run.log_artifact(artifact)


def _print_table(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
