"""``privknn fit / validate / test``: LightningCLI that knows this package's classes by name."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import ArgumentError, Namespace
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from pl_privknn import _lightning as pl
from pl_privknn._checks import check_installed
from pl_privknn._lightning import rank_zero_only
from pl_privknn._parsing import Parser
from pl_privknn.callbacks.loggers import finish_wandb, spender_of
from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.callbacks.run_summary import (
    RunReport,
    errors_as_warnings,
    interruption,
    left_out_of,
    previous,
    usable_checkpoint,
)
from pl_privknn.cli.common import importable, suggest
from pl_privknn.config import (
    Built,
    ConfigurationError,
    build,
    class_names,
    import_named,
    one_line,
    set_yaml,
)
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.networks.base import network_arguments
from pl_privknn.privacy.files import LOCK, FolderLock, new_number, replaced_durably, write_durably
from pl_privknn.privacy.verify import CHECKPOINT
from pl_privknn.report import write_report

if TYPE_CHECKING:
    from pl_privknn.recommendation.recommend import Recommendation

_MISCONFIGURED = pl.both("utilities.exceptions.MisconfigurationException")
_BEFORE_QUERIES = {LOCK, "config.yaml", "hparams.yaml", "metrics.csv"}
#: Loggers that the extra of the same name installs.
_LOGGERS = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}
#: Arguments of the trainer's methods that the command line does not give.
_GIVEN = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}

set_yaml()


def run_training(
    command: str,
    words: Sequence[str],
    configs: Sequence[str] = (),
    resume: str | None = None,
    data: pl.LightningDataModule | None = None,
    recommended: Recommendation | None = None,
    name: str = "",
) -> int:
    """Run ``fit``, ``validate`` or ``test``.

    Args:
        command: the name of the command.
        words: options of LightningCLI.
        configs: configuration files, overridden by ``words``.
        resume: folder of an interrupted run, whose configuration and last checkpoint are used.
        data: the data module of the configuration, if it is already constructed.
        recommended: a recommendation, whose objects are trained instead of those of a configuration.
        name: of the folder of a recommended run.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: for invalid arguments or configurations.
    """
    if resume is not None:
        configs = [str(Path(resume) / "config.yaml"), *configs]
        words = [*_resumed_words(Path(resume)), *words]
    words = [*(word for file in configs for word in ("--config", file)), *words]
    cli: PrivKNNCLI | None = None
    try:
        with importable(list(configs)), contextlib.ExitStack() as leaving:
            cli = PrivKNNCLI(
                command, words, leaving, data, None if resume is None else Path(resume), recommended, name
            )
            cli.run()
    except (KeyboardInterrupt, SystemExit) as stop:
        trainer = getattr(cli, "trainer", None)
        if isinstance(stop, SystemExit) and not getattr(trainer, "interrupted", False):
            raise
        print(f"privknn: {_interruption(cli)}", file=sys.stderr)
        return 128 + signal.SIGINT
    except _MISCONFIGURED as error:
        raise ConfigurationError(one_line(error)) from error
    return 0


def _interruption(cli: PrivKNNCLI | None) -> str:
    """Describe what a run stopped by Ctrl-C spent and kept, and how to resume it."""
    spender = None if cli is None else spender_of(cli.trainer, cli.model)
    if cli is None or spender is None:
        return "interrupted before the run: no privacy budget was spent. Repeat the command to continue"
    saved = usable_checkpoint(cli.folder / CHECKPOINT) is not None
    return interruption(spender, cli.folder, saved, f"privknn fit --resume {cli.folder}")


def _resumed_words(folder: Path) -> list[str]:
    """Options that continue the run in a folder, besides its configuration."""
    if (missing := left_out_of((folder / "config.yaml").read_text(encoding="utf-8"))) is not None:
        raise ValueError(
            f"--resume {folder}: this run was started in Python, and config.yaml can't express its {missing}; "
            "continue in Python, with trainer.fit(..., ckpt_path=...)"
        )
    checkpoint = usable_checkpoint(folder / CHECKPOINT)
    return ["--run_dir", str(folder), *([] if checkpoint is None else ["--ckpt_path", str(checkpoint)])]


def _remove_unused(folder: Path) -> None:
    """Remove a folder that holds no query."""
    if {path.name for path in folder.glob("*")} <= _BEFORE_QUERIES:
        shutil.rmtree(folder, ignore_errors=True)


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
        """Parse with ``"."``, the run's folder, as the default of TensorBoard's required folder."""
        for logger in _listed(cfg.get("trainer.logger")):
            if isinstance(logger, Namespace) and str(logger.get("class_path")).endswith("TensorBoardLogger"):
                logger["init_args.save_dir"] = logger.get("init_args.save_dir") or "."
        return super()._parse_common(cfg, *args, **kwargs)


class PrivKNNCLI(LightningCLI):
    """LightningCLI with a ``labeling`` section (:class:`PrivateLabeler`) and a folder for each run.

    Args:
        command: the trainer's method: ``fit``, ``validate`` or ``test``.
        words: options of the command line.
        leaving: stack on which the run's folder is put, to be unlocked and, without any query, removed at the end.
        data: the data module of the configuration, if it is already constructed.
        resumed: folder of an interrupted run, which may have moved.
        recommended: see :func:`run_training`; options are then those of the trainer alone.
        name: see :func:`run_training`.
    """

    folder: Path

    def __init__(
        self,
        command: str,
        words: list[str],
        leaving: contextlib.ExitStack,
        data: pl.LightningDataModule | None = None,
        resumed: Path | None = None,
        recommended: Recommendation | None = None,
        name: str = "",
    ) -> None:
        self.command, self.leaving, self.made_data, self.resumed = command, leaving, data, resumed
        self.recommended, self.name = recommended, name
        trainer = {"max_epochs": 20, "logger": None, "enable_model_summary": False}
        if recommended is not None:
            trainer |= recommended.config["trainer"]
        super().__init__(
            model_class=pl.package_of().LightningModule,
            datamodule_class=pl.package_of().LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=_SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults=trainer,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=TrainingParser,
            parser_kwargs={"prog": f"privknn {command}", "exit_on_error": False},
            args=words,
            run=False,
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the trainer and, unless the run is recommended, of data, module and labeling."""
        if self.recommended is not None:
            parser.add_lightning_class_args(self.trainer_class, "trainer")
            parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
            return
        super().add_core_arguments_to_parser(parser)
        parser.add_lightning_class_args(PrivateLabeler, "labeling")
        # The parser must not ask for what the data say; config.build takes it from them.
        for source, target in (("num_classes", "num_classes"), ("task", "task")):
            parser.link_arguments(f"data.{source}", f"model.init_args.{target}", apply_on="instantiate")
        for target in ("in_channels", "image_size"):
            parser.link_arguments(
                "data.image_shape",
                f"model.init_args.{target}",
                lambda shape, name=target: network_arguments(shape)[name],
                apply_on="instantiate",
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's folder, and the arguments of the trainer's method."""
        parser.usage = f"privknn {self.command} --config FILE [--OPTION VALUE ...]"
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
        self._of_method = parser.add_method_arguments(self.trainer_class, self.command, skip=set(_GIVEN))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line and its files.

        Raises:
            ConfigurationError: for unknown arguments or invalid values.
        """
        words = list(map(str, args or []))
        files = [Path(word) for word in words if word.endswith((".yaml", ".yml", ".json"))]
        import_named([*words, *(file.read_text(encoding="utf-8") for file in files if file.is_file())])
        if "--help" in words:
            import_named(list(class_names()))
        try:
            self.config = parser.parse_args(args)  # type: ignore[arg-type]  # of Lightning, wider than jsonargparse's
        except (ArgumentError, ArithmeticError) as error:
            text = one_line(error, [action.dest for action in parser._actions])
            see = "" if "did you mean" in text else f"; see privknn {self.command} --help"
            raise ConfigurationError(f"{text}{see}") from error

    def before_instantiate_classes(self) -> None:
        """Choose and lock the run's folder, and put loggers into it."""
        config, trainer = self.config, self.config.trainer
        for logger in _listed(trainer.logger):
            name = logger.class_path.rpartition(".")[2]
            if name in _LOGGERS:
                check_installed(f"trainer.logger {name}", _LOGGERS[name], _LOGGERS[name])
        if self.resumed is not None and Path(config.run_dir) != self.resumed:
            raise ConfigurationError(
                f"--run_dir {config.run_dir}: --resume {self.resumed} continues in its folder; leave out --run_dir"
            )
        made = not (config.run_dir and Path(config.run_dir).exists())
        self.folder = Path(config.run_dir) if config.run_dir else new_folder(config, self.name)
        config.run_dir = str(self.folder)
        fits = self.command == "fit" and not trainer.fast_dev_run
        if fits and getattr(rank_zero_only, "rank", 0) == 0:
            if made:
                self.leaving.callback(_remove_unused, self.folder)
            self.leaving.enter_context(
                FolderLock(self.folder, shared=True)
            )  # before any access to the folder
        self._written = config.clone()  # to config.yaml, without the places below: a run may be moved
        if self.recommended is not None:
            if self.recommended.data.owes_names:
                self.recommended = self.recommended.with_names(self.folder)
                print(self.recommended, self.recommended.size_line(), sep="\n", flush=True)
            chosen = {name: value for name, value in config.trainer.as_dict().items() if value is not None}
            others = {name: config[name] for name in ("seed_everything", "run_dir", "attach_ledger")}
            self.save_config_kwargs["text"] = self.recommended.to_yaml(trainer=chosen, **others)
        if trainer.default_root_dir is None or self.resumed:
            trainer.default_root_dir = str(self.folder)
        for logger in _listed(trainer.logger):
            arguments = logger.get("init_args") or Namespace()
            if "save_dir" in arguments and arguments.save_dir in (None, "."):
                arguments.save_dir = str(self.folder)

    def instantiate_classes(self) -> None:
        """Instantiate trainer, data, student and labeler.

        Raises:
            ConfigurationError: for arguments rejected by their constructors.
        """
        refused = (
            ArgumentError,
            ArithmeticError,
            ModuleNotFoundError,
            TypeError,
            ValueError,
            *_MISCONFIGURED,
        )
        try:
            if self.recommended is None:
                self._built = build(self.config.as_dict(), data=self.made_data)
            else:
                student, labeling = self.recommended.build()
                others = build({"trainer": self.config.trainer.as_dict()}).callbacks
                self._built = Built(self.recommended.data, student, [labeling, *others])
            self.datamodule, self.model = self._built.data, self._built.module
            self.config_init = self._with_trainer()
            self.trainer = self.instantiate_trainer()
        except refused as error:
            raise ConfigurationError(one_line(error)) from error

    def _with_trainer(self) -> Namespace:
        """Configuration with the objects of the trainer's other arguments, such as loggers."""
        parser = TrainingParser(exit_on_error=False)
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        config = self.config.clone()
        config.trainer.callbacks = None
        config.trainer = parser.instantiate(Namespace(trainer=config.trainer)).trainer
        return config

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Trainer with a CSV logger, a checkpoint after every epoch and a summary at the end."""
        package, chosen = pl.package_of(self.model, self.datamodule), self.config_init.trainer
        self.trainer_class, self.config = package.Trainer, self._written
        kwargs["logger"] = chosen.logger or False
        if self.command == "fit" and chosen.logger is not False and not chosen.fast_dev_run:
            csv = package.loggers.CSVLogger(self.folder, name="", version="", flush_logs_every_n_steps=100)
            kwargs["logger"] = [csv, *_listed(chosen.logger)]
        self.run_report = RunReport(self.folder, show=False)  # once, after the test
        callbacks: list[pl.Callback] = [self.run_report]
        own = any(isinstance(one, package.callbacks.Checkpoint) for one in self._built.callbacks)
        if chosen.enable_checkpointing is not False and not own:
            place = self.folder / CHECKPOINT
            callbacks.append(
                package.callbacks.ModelCheckpoint(
                    place.parent, place.stem, enable_version_counter=False, save_on_train_epoch_end=True
                )
            )
        logging.disable(logging.INFO)  # an advertisement of Lightning's
        try:
            given = {**chosen.as_dict(), **kwargs, "callbacks": [*self._built.callbacks, *callbacks]}
            trainer = self._instantiate_trainer(given, [])
        finally:
            logging.disable(logging.NOTSET)
        if type(trainer.strategy.checkpoint_io) in pl.both("plugins.io.TorchCheckpointIO"):
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        return trainer

    def run(self) -> None:
        """Run the command."""
        given = {name: self.config_init[name] for name in self._of_method}
        if self.command == "fit":
            self._fit(given)
        else:
            getattr(self.trainer, self.command)(self.model, datamodule=self.datamodule, **given)

    def _fit(self, given: dict[str, Any]) -> None:
        """Train; errors after the training, such as of a logger's last file, become warnings."""
        trainer: Any = self.trainer
        for owner in (*trainer.callbacks, getattr(self.model, "private_training", None)):
            if hasattr(owner, "privacy_summary") and owner.run_dir is None:
                owner.run_dir = self.folder  # a copied run continues in the copy
        metrics = self.folder / "metrics.csv"
        if metrics.exists():  # the CSV logger overwrites it
            metrics.rename(self.folder / f"metrics.{len(list(self.folder.glob('metrics.*.csv')))}.csv")
        # Its files are a run's own, and earlier metrics were renamed.
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
        try:
            trainer.fit(self.model, datamodule=self.datamodule, **given)
        except Exception:
            if not self.run_report.summary:
                raise
            with errors_as_warnings("a step after the training"):
                raise
        if not trainer.fast_dev_run and (self.run_report.summary or not trainer.interrupted):
            self._finish()

    def _finish(self) -> None:
        """Test the student of the last epoch, then print the table and the run's folder."""
        trainer: Any = self.trainer
        package = pl.package_of(trainer)
        tests = package.utilities.model_helpers.is_overridden(
            "test_step", self.model, package.LightningModule
        )
        if tests and isinstance(self.datamodule, PrivatePublicDataModule) and len(self.datamodule.test):
            with errors_as_warnings("the test"):
                trainer.test(self.model, datamodule=self.datamodule, verbose=False)
        if not trainer.is_global_zero:
            return
        self.run_report.print_table()
        files = {}
        with errors_as_warnings("the report for the logger"):
            if self.config.attach_ledger and (spender := spender_of(trainer, self.model)):
                files = {"ledger.sqlite": spender.ledger.path, "report.html": write_report(self.folder)}
            finish_wandb(trainer, self.run_report.summary, files)
        suggest(f"report {self.folder}")
        print(self.folder)


class _SaveRunConfig(SaveConfigCallback):
    """Callback that writes ``config.yaml`` to the run's folder; evaluations leave the training's file unchanged.

    Args:
        *args: see ``SaveConfigCallback``.
        text: content of the file; by default the parsed configuration.
        **kwargs: see ``SaveConfigCallback``.
    """

    def __init__(self, *args: Any, text: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._text = text

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._resumed = stage == "fit" and (Path(str(trainer.log_dir)) / self.config_filename).exists()
        if stage == "fit" and not self._resumed:
            self._write(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the file of a resumed run after its changes were accepted."""
        if self._resumed:
            self._write(trainer, pl_module)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._text is None:
            super().setup(trainer, pl_module, "fit")
        elif trainer.is_global_zero and not self.already_saved:
            write_durably(Path(str(trainer.log_dir)) / self.config_filename, self._text)
            self.already_saved = True


def _listed(value: Any) -> list[Any]:
    """Sections under a key that holds one, a list of them or None, as a list."""
    return value if isinstance(value, list) else [] if value in (None, True, False) else [value]


def new_folder(config: Namespace, name: str = "") -> Path:
    """Path ``runs/NAME/NUMBER`` with the first free number; in the trainer's root, if given.

    NAME is by default the stem of the first configuration file, else the student's class.
    """
    files = [str(path) for path in (config.get("config") or [])]
    name = name or (Path(files[0]).stem if files else str(config.model.class_path).rsplit(".", 1)[-1])
    return new_number(Path(config.trainer.default_root_dir or "runs") / name)


class DurableCheckpointIO(pl.TorchCheckpointIO):
    """Checkpoint IO that replaces files atomically and durably.

    Lightning writes to the system's folder for temporary files; a move from there to another file system is a copy,
    which a kill leaves half done. The checkpoint before the last one is kept as ``NAME.previous.ckpt``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint atomically: after a crash ``path`` holds the old or the new one."""
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced_durably(place) as file:
            torch.save(checkpoint, file)
            if place.exists():
                kept = previous(place)
                kept.unlink(missing_ok=True)
                os.link(place, kept)
