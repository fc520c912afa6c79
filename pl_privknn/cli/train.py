"""``privknn fit / validate / test``: LightningCLI that knows this package's classes by name."""

from __future__ import annotations

import contextlib
import inspect
import logging
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jsonargparse import ActionConfigFile, ArgumentError, Namespace
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from pl_privknn import _lightning as pl
from pl_privknn._checks import at_most, check_installed, check_int
from pl_privknn._lightning import MESSAGES, rank_zero_info, rank_zero_only
from pl_privknn._parsing import Parser
from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.callbacks.loggers import finish_wandb, labeling_of, spender_of
from pl_privknn.callbacks.run_files import CHECKPOINT, DurableCheckpointIO, left_out_of, usable_checkpoint
from pl_privknn.callbacks.run_summary import errors_as_warnings
from pl_privknn.cli.common import importable, shown_text, suggest, user_error
from pl_privknn.config import ConfigurationError, known_classes, one_line
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.privacy.folders import LOCK, FolderLock, new_number
from pl_privknn.report import write_report
from pl_privknn.training import NoisySGD, PrivateTraining

_MISCONFIGURED = pl.both("utilities.exceptions.MisconfigurationException")

#: Patterns of warnings about Lightning's internals, and about matters that this package handles.
_IGNORED_WARNINGS = (
    "LightningCLI's args parameter is intended",
    "Experiment logs directory .* exists and is not empty",  # moved away by PrivKNNCLI.before_fit
    "Checkpoint directory .* exists and is not empty",  # a resumed run's
    ".*does not have many workers",  # examples are in memory
    "Total length of `list` across ranks is zero",  # unlabelled public examples can't validate
    *MESSAGES,
)
_BEFORE_QUERIES = {LOCK, "config.yaml", "hparams.yaml", "metrics.csv"}
#: Loggers that the extra of the same name installs.
_LOGGERS = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}
#: Parts of Lightning's log messages that are not shown.
_IGNORED_LOGS = (
    "litlogger",
    "litmodels",
    "TPU available",
    "HPU available",
    "passed to Trainer: LeavesFolder",
)

known_classes()  # allows YAML to name them without a module path


def run_training(
    command: str,
    words: Sequence[str],
    configs: Sequence[str] = (),
    run_dir: str | None = None,
    ckpt_path: str | None = None,
    resume: str | None = None,
    data: pl.LightningDataModule | None = None,
) -> int:
    """Run ``fit``, ``validate`` or ``test``.

    Args:
        command: the name of the command.
        words: options of LightningCLI.
        configs: configuration files, overridden by ``words``.
        run_dir: folder of the run.
        ckpt_path: a checkpoint of the student.
        resume: folder of an interrupted run, whose configuration and last checkpoint are used.
        data: the data module of the configuration, if it is already constructed.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: for invalid arguments, configurations or checkpoints.
    """
    if resume is not None:
        if run_dir is not None and Path(run_dir).resolve() != Path(resume).resolve():
            raise ValueError(
                f"--run_dir {run_dir}: --resume {resume} continues in its own folder; leave out --run_dir"
            )
        configs, run_dir = [str(Path(resume) / "config.yaml"), *configs], resume
        ckpt_path = ckpt_path or _last_checkpoint(Path(resume))
    given = [*(("--config", file) for file in configs), ("--run_dir", run_dir), ("--ckpt_path", ckpt_path)]
    options = [word for name, value in given if value is not None for word in (name, value)]
    cli: type[PrivKNNCLI] = type(
        "PrivKNNCLI", (PrivKNNCLI,), {"methods": (command,), "made_data": data, "resumed": resume is not None}
    )
    try:
        with quietly(command), importable(list(configs)):
            cli.run_words([command, *options, *words])
    except (KeyboardInterrupt, SystemExit) as stop:
        _leave(cli.running)
        if (status := _interrupted(stop, cli.running)) is None:
            raise
        return status
    except _MISCONFIGURED as error:
        _leave(cli.running)
        raise ConfigurationError(one_line(error)) from error
    except Exception as error:
        _leave(cli.running)
        if user_error(error) is None and _restoring(error):
            # Shows a mismatch of the network in full, but not torch's advice on unsafe files.
            why = shown_text(one_line(error)) if type(error) is RuntimeError else type(error).__name__
            raise ConfigurationError(
                f"ckpt_path={ckpt_path} can't be restored ({why}); give a checkpoint of the same student"
            ) from error
        raise
    return 0


def _interrupted(stop: BaseException, cli: PrivKNNCLI | None) -> int | None:
    """Print how to resume a run stopped by Ctrl-C; returns the exit status, or None for another exit."""
    trainer = getattr(cli, "trainer", None)
    if isinstance(stop, SystemExit) and not getattr(trainer, "interrupted", False):
        return None
    text = "interrupted before the run: no privacy budget was spent. Repeat the command to continue"
    if cli is not None and trainer is not None and (spender := spender_of(trainer, cli.model)) is not None:
        folder, kept, report = cli._subconfig().run_dir, ["the ledger"], spender.ledger.report()
        if hasattr(spender, "label_counts"):
            kept.append(f"labels of {spender.label_counts()['answered']} queries")
        if usable_checkpoint(Path(folder) / CHECKPOINT) is not None:
            kept.append("a checkpoint of the last full epoch")
        text = (
            f"interrupted. ε spent: {at_most(report.spent.epsilon)} of the stated "
            f"{at_most(report.guarantee.epsilon)}, at δ {report.spent.delta:g}. Kept in {folder}: {', '.join(kept)}; "
            f"continuing does not charge them again. Continue with: privknn fit --resume {folder}"
        )
    print(f"privknn: {text}", file=sys.stderr)
    return 128 + signal.SIGINT


def _leave(cli: PrivKNNCLI | None) -> None:
    """Unlock the folder, and remove it if this command created it and made no query."""
    lock, folder = (getattr(cli, name, None) for name in ("_lock", "made_folder"))
    if lock is not None:
        lock.release()
    if folder is not None and {path.name for path in folder.glob("*")} <= _BEFORE_QUERIES:
        shutil.rmtree(folder, ignore_errors=True)


def _restoring(error: Exception) -> bool:
    """Whether an error was raised while a checkpoint was read."""
    files = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return "checkpoint_connector.py" in files


def _last_checkpoint(folder: Path) -> str | None:
    """Checkpoint from which a run in a folder is resumed."""
    if (missing := left_out_of((folder / "config.yaml").read_text(encoding="utf-8"))) is not None:
        raise ValueError(
            f"--resume {folder}: this run was started in Python, and config.yaml can't express its {missing}; "
            "continue in Python, with trainer.fit(..., ckpt_path=...)"
        )
    checkpoint = usable_checkpoint(folder / CHECKPOINT)
    return None if checkpoint is None else str(checkpoint)


# ---------------------------------------------------------------------------- the command


class TrainingParser(Parser, LightningArgumentParser):
    """Lightning's parser, for modules and loggers of both Lightning packages."""

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the section of a class, or of subclasses of a base class of both Lightning packages."""
        if not subclass_mode:
            return super().add_lightning_class_args(lightning_class, nested_key, required=required)
        classes = pl.both(lightning_class.__name__)
        return self.add_subclass_arguments(classes, nested_key, fail_untyped=False, required=required)

    def _parse_common(self, cfg: Namespace, *args: Any, **kwargs: Any) -> Namespace:
        """Parse with the run's folder as the default of loggers that require a folder."""
        for section in (cfg, *(value for value in vars(cfg).values() if isinstance(value, Namespace))):
            loggers = section.get("trainer.logger")
            for logger in loggers if isinstance(loggers, list) else [loggers]:
                if isinstance(logger, Namespace):
                    _add_folder(logger)
        return super()._parse_common(cfg, *args, **kwargs)


def _add_folder(logger: Namespace) -> None:
    """Set a required folder of a logger to the placeholder of the run's folder."""
    module, _, name = str(logger.get("class_path")).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        return
    parameter = inspect.signature(found).parameters.get("save_dir")
    if parameter is not None and parameter.default is parameter.empty:
        arguments = logger.get("init_args") or Namespace()
        if arguments.get("save_dir") is None:
            arguments.save_dir = "."
        logger.init_args = arguments


class PrivKNNCLI(LightningCLI):
    """LightningCLI with a ``labeling`` section (:class:`PrivateLabeler`) and a folder for each run."""

    #: Available methods of the trainer. Each takes a second to describe, so a command describes only itself.
    methods: ClassVar[tuple[str, ...]] = ("fit", "validate", "test")
    #: Data module of the configuration, if it is already constructed.
    made_data: ClassVar[pl.LightningDataModule | None] = None
    #: Whether the run was started by an earlier command, in a folder that may have moved since.
    resumed: ClassVar[bool] = False
    #: The running command, for the message of an interruption.
    running: ClassVar[PrivKNNCLI | None] = None

    @classmethod
    def run_words(cls, words: list[str]) -> None:
        """Run the command of these arguments."""
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
        """Parser with an option for configuration files; see :meth:`LightningCLI.init_parser`."""
        parser = TrainingParser(dump_header=[f"pytorch_lightning=={pl.package_of().__version__}"], **kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="configuration file, YAML or JSON"
        )
        return parser

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """Available methods of the trainer, with the arguments that LightningCLI sets."""
        return {
            name: {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
            for name in cls.methods
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the ``labeling`` section, the run's folder, and links from the data to the network."""
        parser.usage = f"privknn {self.methods[0]} --config FILE [--OPTION VALUE ...]"
        parser.add_lightning_class_args(PrivateLabeler, "labeling")
        parser.add_argument(
            "--run_dir",
            type=str | None,
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
            ConfigurationError: for unknown arguments or invalid values.
        """
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, ArithmeticError) as error:
            words = args if isinstance(args, list) else []
            options = [] if not words else [a.dest for a in self._subcommand_parsers[words[0]]._actions]
            text = one_line(error, options)
            see = "" if "did you mean" in text else f"; see privknn {words[0] if words else 'fit'} --help"
            raise ConfigurationError(f"{text}{see}") from error
        seed = self.config[self.config.subcommand].seed_everything
        if not isinstance(seed, bool):
            check_int("seed_everything", seed, minimum=0, maximum=2**32 - 1)

    def instantiate_classes(self) -> None:
        """Instantiate trainer, data, student and labeler.

        Raises:
            ConfigurationError: for arguments rejected by their constructors.
        """
        self._written = self.config
        if self.made_data is not None:
            self.config = self.config.clone()
            self.config[f"{self.subcommand}.data"] = self.made_data
        try:
            super().instantiate_classes()
        except (ArgumentError, ArithmeticError, ValueError, TypeError, *_MISCONFIGURED) as error:
            raise ConfigurationError(one_line(error)) from error

    def _parse_ckpt_path(self) -> None:
        """Keep the command line unchanged.

        Lightning would silently replace it by the checkpoint's hyper-parameters.
        """

    def before_instantiate_classes(self) -> None:
        """Set the run's folder, and those of loggers and checkpoints within it."""
        config = self._subconfig()
        made = not (config.run_dir and Path(config.run_dir).exists())
        folder = Path(config.run_dir) if config.run_dir else new_folder(config)
        config.run_dir = str(folder)
        type(self).running = self
        if (
            self.subcommand == "fit"
            and not config.trainer.fast_dev_run
            and getattr(rank_zero_only, "rank", 0) == 0
        ):
            self._lock = FolderLock(folder, shared=True)  # before any access to the folder
            self.made_folder = folder if made else None
        root = config.trainer.default_root_dir
        config.trainer.default_root_dir = str(folder) if self.resumed or root is None else root
        if self.subcommand != "fit":
            # An evaluation must not overwrite the run's metrics.csv.
            config.trainer.logger = config.trainer.logger or False
        elif config.trainer.logger is not False and not config.trainer.fast_dev_run:
            config.trainer.logger = run_loggers(config.trainer.logger, folder, root)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Trainer with a checkpoint after every epoch and a summary at the end."""
        self.config = self._written  # written to config.yaml
        self.trainer_class = pl.package_of(self.model, self.datamodule).Trainer
        trainer = super().instantiate_trainer(**kwargs)
        folder = Path(self._subconfig().run_dir)
        self.run_report = RunReport(folder, show=False)  # once, after the test
        trainer.callbacks.append(self.run_report)  # type: ignore[attr-defined]
        trainer.callbacks = [replace_default_callback(one, folder) for one in trainer.callbacks]  # type: ignore[attr-defined]
        if type(trainer.strategy.checkpoint_io) in pl.both("plugins.io.TorchCheckpointIO"):
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        return trainer

    def before_fit(self) -> None:
        """Rename the metrics file of an interrupted run, since the CSV logger overwrites it."""
        folder = Path(self._subconfig().run_dir)
        own = self.model.private_training if isinstance(self.model, NoisySGD) else None
        for owner in (*self.trainer.callbacks, own):  # type: ignore[attr-defined]
            if isinstance(owner, PrivateLabeler | PrivateTraining) and owner.run_dir is None:
                owner.run_dir = folder  # a copied run continues in the copy
        metrics = folder / "metrics.csv"
        if metrics.exists():
            number = len(list(folder.glob("metrics.*.csv")))
            metrics.rename(folder / f"metrics.{number}.csv")

    def fit(self, **kwargs: Any) -> None:
        """Train; errors after the training, such as of a logger's last file, become warnings."""
        try:
            self.trainer.fit(**kwargs)
        except Exception:
            if not self.run_report.summary:
                raise
            with errors_as_warnings("a step after the training"):
                raise

    def after_fit(self) -> None:
        """Test the student of the last epoch, then print the table and the run's folder."""
        trainer: Any = self.trainer
        if trainer.fast_dev_run or (trainer.interrupted and not self.run_report.summary):
            return
        package = pl.package_of(self.trainer)
        tests = package.utilities.model_helpers.is_overridden(
            "test_step", self.model, package.LightningModule
        )
        if tests and isinstance(self.datamodule, PrivatePublicDataModule) and len(self.datamodule.test):
            with errors_as_warnings("the test"):
                self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            self.run_report.print_table()
            folder, files = Path(self._subconfig().run_dir), {}
            with errors_as_warnings("the report for the logger"):
                if self._subconfig().attach_ledger and (spender := spender_of(self.trainer, self.model)):
                    files = {"ledger.sqlite": spender.ledger.path, "report.html": write_report(folder)}
                finish_wandb(self.trainer, self.run_report.summary, files)
            suggest(f"report {folder}")
            print(folder)

    def _subconfig(self) -> Namespace:
        return self.config.get(str(self.subcommand), self.config)


class _SaveRunConfig(SaveConfigCallback):
    """Callback that writes ``config.yaml`` to the run's folder; evaluations keep that of the training."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._resumed = stage == "fit" and (Path(str(trainer.log_dir)) / self.config_filename).exists()
        if stage == "fit" and not self._resumed:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the file of a resumed run after its changes were accepted."""
        if self._resumed:
            super().setup(trainer, pl_module, "fit")


# ---------------------------------------------------------------------------- a run's folder


def _name_of(config: Namespace) -> str:
    """Stem of the first configuration file, else the student's name."""
    files = [str(path) for path in (config.get("config") or [])]
    if files:
        return Path(files[0]).stem
    return str(config.model.class_path).rsplit(".", 1)[-1]


def new_folder(config: Namespace) -> Path:
    """Path ``runs/NAME/NUMBER`` with the first free number; in the trainer's root, if given."""
    return new_number(Path(config.trainer.default_root_dir or "runs") / _name_of(config))


def run_loggers(chosen: Any, folder: Path, root: str | None = None) -> list[Namespace]:
    """Loggers of a run: the CSV logger and those chosen by the user, all in the run's folder.

    A logger in the trainer's root, as that of a resumed run, is moved there too.
    """
    csv = Namespace(
        class_path="pytorch_lightning.loggers.CSVLogger",
        init_args=Namespace(
            save_dir=str(folder), name="", version="", prefix="", flush_logs_every_n_steps=100
        ),
    )
    others = [] if chosen in (None, True) else chosen if isinstance(chosen, list) else [chosen]
    for logger in others:
        name = logger.class_path.rpartition(".")[2]
        if name in _LOGGERS:
            check_installed(f"trainer.logger {name}", _LOGGERS[name], _LOGGERS[name])
        arguments = logger.get("init_args")
        if arguments is not None and str(arguments.get("save_dir")) in (".", "None", str(root)):
            arguments.save_dir = str(folder)
    return [csv, *[logger for logger in others if "CSVLogger" not in logger.class_path]]


# ---------------------------------------------------------------------------- output


class ParameterCount(pl.Callback):
    """Callback that logs the number of parameters, in place of Lightning's model summary."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the number of trained parameters."""
        size = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
        rank_zero_info(f"{type(pl_module).__name__}: {size:,} parameters to train")


class _OneLine:
    """Mixin for Lightning's progress bar on one line of 80 columns, with the round."""

    def _get_train_description(self, current_epoch: int) -> str:
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        labeling, text = labeling_of(trainer), f"epoch {current_epoch + 1}/{trainer.max_epochs}"
        if labeling is None or labeling.labeler is None:
            return text
        round_ = min(current_epoch // labeling.epochs_per_round + 1, labeling.rounds)
        return f"{text} round {round_}/{labeling.rounds}"

    def configure_columns(self, trainer: Any) -> list[Any]:
        """Columns of Lightning's bar, shortened and without the speed."""
        columns = super().configure_columns(trainer)  # type: ignore[misc]
        for column in columns:
            if hasattr(column, "bar_width"):
                column.bar_width = 10
        return [column for column in columns if type(column).__name__ != "ProcessingSpeedColumn"]

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        """Metrics of Lightning's bar, with short names for those of this package."""
        names = {"val/accuracy": "val", "train/loss": "loss"}
        found = super().get_metrics(trainer, module)  # type: ignore[misc]
        return {names.get(name, name): value for name, value in found.items() if name != "v_num"}


def replace_default_callback(callback: Any, folder: Path) -> Any:
    """Replacement of one of Lightning's default callbacks; a user's callback is returned unchanged.

    The checkpoint is saved after every epoch, for resuming.
    """
    kind = type(callback)
    if kind in pl.both("callbacks.ModelCheckpoint") and callback.dirpath is callback.monitor is None:
        return kind(
            dirpath=folder / CHECKPOINT.parent,
            filename=CHECKPOINT.stem,
            enable_version_counter=False,
            save_on_train_epoch_end=True,
        )
    tables = (*pl.both("callbacks.ModelSummary"), *pl.both("callbacks.RichModelSummary"))
    if kind in tables and callback._max_depth == 1:  # a deeper one was requested by the user
        return ParameterCount()
    if kind in pl.both("callbacks.RichProgressBar"):
        return type("OneLine", (_OneLine, kind), {})(callback.refresh_rate)
    return callback


@contextlib.contextmanager
def quietly(command: str) -> Iterator[None]:
    """Run a command without :data:`_IGNORED_WARNINGS` and :data:`_IGNORED_LOGS`; other warnings take one line."""
    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in names]
    shown: set[str] = set()

    def one_line(message: Any, *_: Any, **__: Any) -> str:
        text = " ".join(str(message).split())
        new = text not in shown
        shown.add(text)
        return f"privknn {command}: {text}\n" if new else ""

    before = warnings.formatwarning
    with warnings.catch_warnings():
        for text in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=text)
        for logger in loggers:
            logger.addFilter(_is_wanted)
        warnings.formatwarning = one_line
        try:
            yield
        finally:
            warnings.formatwarning = before
            for logger in loggers:
                logger.removeFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _IGNORED_LOGS)
