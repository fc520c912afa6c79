"""The parser of ``privknn fit`` and its siblings: Lightning's, with the toolkit's own options first in its help."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from jsonargparse import Namespace
from pytorch_lightning.cli import LightningArgumentParser

from pl_privknn import _lightning as pl

#: First words of Lightning's own options.
_LIGHTNINGS = (
    "trainer",
    "optimizer",
    "lr_scheduler",
    "ckpt_path",
    "weights_only",
    "verbose",
    "return_predictions",
)
_TITLES = {"model": "student", "data": "data"}


class TrainingParser(LightningArgumentParser):
    """Lightning's parser, with the toolkit's own options first in its help.

    Attributes:
        topic: ``"trainer"`` for help on Lightning's options, else help is on the toolkit's.
    """

    topic: str | None = None

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the section of a class, or of the subclasses that modules and data modules of both packages are."""
        if not subclass_mode:
            return super().add_lightning_class_args(lightning_class, nested_key, required=required)
        classes = pl.both(lightning_class.__name__)
        return self.add_subclass_arguments(classes, nested_key, fail_untyped=False, required=required)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Help on the options that were asked for."""
        if all(action.dest != "trainer" for action in self._actions):
            return super().format_help(*args, **kwargs)
        kept = self._action_groups, self.usage, self.epilog, self.description
        command = self.prog.rsplit(" ", 1)[-1]
        own = {group: _first_word(group) for group in self._action_groups}
        for group in own:
            options = {action.dest for action in group._group_actions}
            group.title = next((title for name, title in _TITLES.items() if name in options), group.title)
        if self.topic == "trainer":
            self._action_groups = [group for group, word in own.items() if word in _LIGHTNINGS]
        else:
            order = ("", "data", "model", "labeling")
            self._action_groups = sorted(
                (
                    group
                    for group, word in own.items()
                    if word not in _LIGHTNINGS and group.title != "Linked arguments"
                ),
                key=lambda group: order.index(own[group]) if own[group] in order else len(order),
            )
            self.epilog = (
                f"Arguments of a class: --model.help CLASS, --data.help CLASS. Options of Lightning's trainer: "
                f"privknn {command} --help trainer."
            )
        self.description = None
        resume = " | --resume DIR" if command == "fit" else ""
        self.usage = f"privknn {command} --config FILE{resume} [--OPTION VALUE ...]"
        try:
            return super().format_help(*args, **kwargs)
        finally:
            self._action_groups, self.usage, self.epilog, self.description = kept

    def _parse_common(self, cfg: Namespace, *args: Any, **kwargs: Any) -> Namespace:
        """Let loggers write into the run's folder unless they are told otherwise; some ask for a folder."""
        for section in (cfg, *(value for value in vars(cfg).values() if isinstance(value, Namespace))):
            loggers = section.get("trainer.logger")
            for logger in loggers if isinstance(loggers, list) else [loggers]:
                if isinstance(logger, Namespace):
                    _add_folder(logger)
        return super()._parse_common(cfg, *args, **kwargs)


def _add_folder(logger: Namespace) -> None:
    """Give a logger that has to be told a folder the placeholder for the run's."""
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


def _first_word(group: Any) -> str:
    """Of the options in a group: the section that they are in, or nothing for options of the command itself."""
    words = {str(action.dest).split(".")[0] for action in group._group_actions}
    return words.pop() if len(words) == 1 else next((word for word in words if word in _LIGHTNINGS), "")
