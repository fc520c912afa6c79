"""``privknn init`` and ``check``, and the arguments of ``fit``, ``validate`` and ``test``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_privknn._checks import check_epsilon, check_int, check_open_unit, counted
from pl_privknn.cli.common import importable, say, suggest

if TYPE_CHECKING:
    from pl_privknn.datamodules.base import PrivatePublicDataModule
    from pl_privknn.labelers.base import Labeler
    from pl_privknn.recommendation.recommend import Recommendation

#: Commands run by LightningCLI, with their help texts.
COMMANDS = {
    "fit": "train a student on privately released labels, or a model by DP-SGD",
    "validate": "evaluate a checkpoint on public examples",
    "test": "evaluate a checkpoint on the test set",
}
#: Options about columns of tables.
_COLUMNS = ("text", "label", "person", "classes", "encoding", "columns", "bounds")
_SECTIONS = """sections of the configuration, each also an option with dots:
  --data CLASS            as FashionMNISTDataModule
  --model CLASS           student, as VATStudent; NoisySGD has no teacher
  --labeling.labeler CLASS
                          teacher, as PrivateKNN, ReverseKNN, PATE
  --labeling.NAME VALUE   as rounds, queries_per_round, budget.epsilon
  --trainer.NAME VALUE    as max_epochs (20), accelerator, logger
  --run_dir DIR           folder of the run (runs/NAME/NUMBER)
  --ckpt_path FILE        a checkpoint of the student
  --SECTION.help CLASS    all arguments of a class

all options: privknn {} --help-all"""


def add_training(commands: Any, name: str) -> None:
    """Register one of :data:`COMMANDS` with argparse's subparsers.

    Unknown arguments are passed to LightningCLI, which takes seconds to import.
    """
    recommends = "--data PATH --epsilon ε --private-records N [OPTIONS]\n       privknn fit "
    parser = commands.add_parser(
        name,
        help=COMMANDS[name],
        description=COMMANDS[name],
        usage=f"privknn {name} {recommends if name == 'fit' else ''}--config FILE [--OPTION VALUE ...]",
        epilog=_SECTIONS.format(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-c", "--config", action="append", default=[], metavar="FILE", help="YAML with any of the sections"
    )
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder")
    if name == "fit":
        title = "instead of --config: the recommended run for these data, ε and records"
        add_recommended(parser.add_argument_group(title), required=False)
    parser.set_defaults(command=name)


def run_training_command(parsed: argparse.Namespace, others: list[str]) -> int:
    """Run ``fit``, ``validate`` or ``test``.

    Args:
        parsed: options of :func:`add_training`.
        others: all other arguments, for LightningCLI.

    Raises:
        ValueError: for arguments that exclude each other, or without anything to run.
        FileNotFoundError: for a file or folder that does not exist.
    """
    command, data = parsed.command, getattr(parsed, "data", None)
    wanted = [getattr(parsed, name, None) for name in ("epsilon", "private_records")]
    if any(value is not None for value in wanted):
        if data is None or None in wanted or parsed.config or parsed.resume:
            raise ValueError(
                "--epsilon and --private-records belong to privknn fit --data PATH --epsilon ε --private-records N; "
                "give these three without --config and --resume, or give --config FILE without them"
            )
        return _fit_recommended(parsed, others)
    sections = ("--data", "--model", "--print_config")
    if not (parsed.config or parsed.resume or data or any(word.startswith(sections) for word in others)):
        raise ValueError(
            "no configuration; give --config FILE, as in --config configs/digits_reverse_knn.yaml, or "
            f"--resume DIR; see privknn {command} --help"
        )
    for file in parsed.config:  # LightningCLI reads configuration from the word itself too
        if file.endswith((".yaml", ".yml", ".json")) and not Path(file).is_file():
            raise FileNotFoundError(
                f"--config {file}: no such file; built-in configurations are configs/NAME.yaml"
            )
    if parsed.resume is not None and not (Path(parsed.resume) / "config.yaml").is_file():
        raise FileNotFoundError(f"--resume {parsed.resume}: no config.yaml; give the folder of a run")
    from pl_privknn.cli.train import run_training

    section = [] if data is None else ["--data", data]
    return run_training(command, [*section, *others], parsed.config, parsed.resume)


def _fit_recommended(parsed: argparse.Namespace, others: list[str]) -> int:
    """Recommend a run for data and start it, with the objects of the recommendation."""
    check_recommended(parsed)
    from pl_privknn import _lightning
    from pl_privknn.cli.train import run_training

    _lightning.load()  # before the data module is made
    changed = [word for word in others if word.startswith(("--data", "--model", "--labeling", "--config"))]
    trial = any(word.startswith("--trainer.fast_dev_run") for word in others)
    found = recommended(parsed, pays=not changed and not trial)
    if not changed:
        return run_training("fit", others, recommended=found, name=_name(parsed.data))
    with tempfile.TemporaryDirectory() as place:  # options of the sections are read as those of a file
        config = Path(place) / f"{_name(parsed.data)}.yaml"  # the run is named after it
        config.write_text(found.to_yaml(), encoding="utf-8")
        return run_training("fit", others, [str(config)])


def add_init(commands: Any) -> None:
    """Register ``privknn init`` with argparse's subparsers."""
    parser = commands.add_parser("init", help="recommend a run for your data and write its configuration")
    add_recommended(parser, required=True)
    parser.add_argument(
        "--output",
        default="private_run.yaml",
        metavar="FILE",
        help="the configuration (private_run.yaml); columns of a table are written to private_run_columns.yaml",
    )
    parser.set_defaults(run=_init)


def add_recommended(parser: argparse._ActionsContainer, required: bool) -> None:
    """Add the options of ``init``, and of ``fit`` without a configuration."""
    parser.add_argument(
        "--data",
        required=required,
        metavar="PATH",
        help="a table, a folder of images, tables or arrays, an .npz file, or YAML with a section data",
    )
    parser.add_argument("--name", help="name of the data in report and privacy card (the folder's name)")
    parser.add_argument(
        "--person", metavar="COLUMN", help="of tables: the column with the person of each record"
    )
    add_places(parser)
    parser.add_argument(
        "--unit", choices=("record", "person"), help="unit of privacy (person with --person, else record)"
    )
    parser.add_argument("--epsilon", type=float, required=required, help="target ε")
    parser.add_argument(
        "--private-records",
        type=int,
        required=required,
        metavar="N",
        help="approximate number of private records, or of persons where these are the unit; becomes public",
    )
    parser.add_argument("--delta", type=float, help="δ (by default the largest power of ten up to 1/(10 N))")
    parser.add_argument("--num-classes", type=int, help="number of classes, where no test set has them")
    parser.add_argument(
        "--public-kind",
        choices=("same", "other"),
        help="whether public examples are of the same kind as private ones (decided by test examples)",
    )
    parser.add_argument(
        "--teacher", choices=("ReverseKNN", "PreconditionedGradients"), help="use this teacher"
    )
    parser.add_argument(
        "--metric",
        choices=("accuracy", "balanced_accuracy"),
        default="accuracy",
        help="balanced_accuracy where classes are uneven and rare ones count as much as large ones",
    )


def data_options() -> set[str]:
    """Names of the arguments that options of :func:`add_recommended` set, without those of files."""
    parser = argparse.ArgumentParser(add_help=False)
    add_recommended(parser, required=False)
    return {action.dest for action in parser._actions} - {"data", "public", "test"}


def add_places(parser: argparse._ActionsContainer) -> None:
    """Add the options for paths of parts of the data and columns of tables."""
    parser.add_argument("--public", metavar="PATH", help="public data in another place (optional)")
    parser.add_argument(
        "--test",
        metavar="PATH",
        help="test data in another place; without public and test data, accuracy "
        "is measured on held-out private records",
    )
    for column, what in (("text", "texts, or of vectors (text)"), ("label", "labels (label)")):
        parser.add_argument(f"--{column}", metavar="COLUMN", help=f"of tables: the column of {what}")
    parser.add_argument(
        "--columns",
        type=lambda names: [name.strip() for name in names.split(",")],
        metavar="NAME,NAME",
        help="of tables of numbers and categories: the columns to use (all others)",
    )
    parser.add_argument(
        "--bounds",
        metavar="FILE",
        help="YAML with the [low, high] of columns of numbers or dates, or the list of a column's categories",
    )
    parser.add_argument(
        "--classes",
        nargs="+",
        metavar="NAME",
        help="names of the classes, for tables whose test part lacks them",
    )
    parser.add_argument(
        "--encoding", metavar="NAME", help="encoding of tables in text files, as latin-1 (UTF-8)"
    )


def places_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Options of :func:`add_places` as arguments of :func:`~pl_privknn.recommend`."""
    columns = {name: value for name in _COLUMNS if (value := getattr(parsed, name, None)) is not None}
    return {"columns": columns, "public": parsed.public, "test": parsed.test}


def _init(parsed: argparse.Namespace) -> int:
    output = Path(parsed.output)
    if output.exists():
        raise FileExistsError(f"--output {output} already exists; name another file")
    place = next(parent for parent in output.resolve().parents if parent.exists())
    if place.is_file() or not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"--output {output}: {place} is not a writable folder")
    found = recommended(parsed)
    output.write_text(found.to_yaml(), encoding="utf-8")
    from pl_privknn.datamodules.tables import TableDataModule

    if isinstance(found.data, TableDataModule):
        columns = output.with_name(f"{output.stem}_columns.yaml")
        if not columns.exists():
            columns.write_text(found.data.schema.to_yaml(found.data.left_out), encoding="utf-8")
        print(f"Columns: {columns}. Fill in what is known, and give it by --bounds {columns}.")
    suggest(f"fit --config {output}")
    return 0


def check_recommended(parsed: argparse.Namespace) -> None:
    """Raise for invalid arguments before slow imports and before data are read.

    Raises:
        ValueError: for a number out of range, or an empty name.
        FileNotFoundError: without data.
    """
    check_int("--private-records", parsed.private_records, 10, 10**9)
    check_epsilon("--epsilon", parsed.epsilon)
    if parsed.delta is not None:
        check_open_unit("--delta", parsed.delta)
    if parsed.num_classes is not None:
        check_int("--num-classes", parsed.num_classes, minimum=2)
    if parsed.classes is not None and len(set(parsed.classes)) < 2:
        raise ValueError(f"--classes {' '.join(parsed.classes)}: expected at least two different names")
    if parsed.name is not None and not parsed.name.strip():
        raise ValueError(f"--name {parsed.name!r}: expected a text, or leave it out for the folder's name")
    if not Path(parsed.data).exists():
        raise FileNotFoundError(
            f"--data {parsed.data}: no such file or folder (working directory: {Path.cwd()})"
        )
    for option in ("public", "test", "bounds"):
        path = getattr(parsed, option) or "none"
        if path != "none" and not any(
            Path(place).exists() for place in (path, path.rpartition(":")[0] or path)
        ):
            raise FileNotFoundError(f"--{option} {path}: no such file or folder; check the path")


def recommended(parsed: argparse.Namespace, pays: bool = False, checks: bool = False) -> Recommendation:
    """Recommendation for the data of a command; prints its reasons.

    Args:
        parsed: options of :func:`add_recommended`.
        pays: pay for names that nobody states, where the teacher's own model is released.
        checks: print the reasons also where names are to be paid for.
    """
    check_recommended(parsed)
    from pl_privknn.recommendation.recommend import recommend

    with importable([parsed.data]):
        found = recommend(
            parsed.data,
            epsilon=parsed.epsilon,
            private_records=parsed.private_records,
            delta=parsed.delta,
            teacher=parsed.teacher,
            num_classes=parsed.num_classes,
            public_kind=parsed.public_kind,
            metric=parsed.metric,
            unit=parsed.unit or ("person" if parsed.person else "record"),
            name=parsed.name,
            progress=sys.stderr.isatty(),
            pays=pays and parsed.num_classes is None,
            **places_of(parsed),
        )
    if found.data.owes_names and not checks:
        say("Classes, or kinds of columns, are not stated; the run pays for them first.")
    else:
        say(*found.reasons, found.size_line())
    return found


def _name(path: str) -> str:
    """Name of a folder or file of data."""
    return Path(path).resolve().stem or "data"


# ---------------------------------------------------------------------------- check


def add_check(commands: Any) -> None:
    """Register ``privknn check`` with argparse's subparsers."""
    text = "inspect your data before a run, or test a labeler class"
    check = commands.add_parser("check", help=text, description=text)
    check.add_argument(
        "labeler",
        nargs="?",
        metavar="CLASS",
        help="a built-in labeler, or the import path of a class that needs no arguments; tested by check_labeler",
    )
    title = "instead of CLASS: data, recommended run and its size; spends no budget and writes no file"
    add_recommended(check.add_argument_group(title), required=False)
    check.set_defaults(run=_run_check)


def _run_check(parsed: argparse.Namespace) -> int:
    wanted = (parsed.data, parsed.epsilon, parsed.private_records)
    if parsed.labeler is None:
        if None in wanted:
            raise ValueError(
                "nothing to check; give --data PATH --epsilon ε --private-records N, or a labeler class"
            )
        return _check_data(parsed)
    if any(value is not None for value in wanted):
        raise ValueError(f"{parsed.labeler}: give either a labeler class or --data PATH, not both")
    return _check_labeler(parsed.labeler)


def _check_labeler(name: str) -> int:
    kind = labeler_class(name)
    from pl_privknn.testing import LabelerCheckError, check_labeler

    try:
        labeler = kind()
    except TypeError as error:
        raise ValueError(
            f"{name}: can't be constructed without arguments ({error}); give them defaults, or call "
            "pl_privknn.testing.check_labeler(labeler)"
        ) from error
    try:
        print(check_labeler(labeler))
    except LabelerCheckError as error:
        print(error)
        return 1
    return 0


def labeler_class(name: str) -> type[Labeler]:
    """The labeler class of a name: a built-in one, or an import path.

    Raises:
        ValueError: for anything else.
    """
    from pl_privknn.config import class_names, did_you_mean

    known = [one for one, room in class_names().items() if room == "pl_privknn.labelers"]
    if "." not in name and name not in known:
        raise ValueError(
            f"{name} must be a built-in labeler or an import path MODULE.CLASS; {did_you_mean(name, known)}"
        )
    import importlib

    from pl_privknn import labelers
    from pl_privknn.labelers.base import Labeler

    module, _, attribute = name.rpartition(".")
    with importable(["labeler.yaml"]):  # of the working directory
        try:
            found = getattr(importlib.import_module(module) if module else labelers, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{name} must be a built-in labeler, such as PrivateKNN, or an import path ({error})"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Labeler)):
        raise ValueError(f"{name} is not a subclass of Labeler")
    return found


def _check_data(parsed: argparse.Namespace) -> int:
    """Print the public facts of the data, the recommended run and its size.

    Private records are not loaded: their content, and which of them a run leaves out, is unknown here.
    """
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        found = recommended(parsed, pays=True, checks=True)
    from pl_privknn.datamodules.base import CLASSES_ARE_PUBLIC
    from pl_privknn.datamodules.tables import KEYS_ARE_PUBLIC, KINDS_ARE_PUBLIC

    data, sizes = found.data, found.sizes
    unit = found.config["labeling"]["budget"].get("unit", "record")
    read = {
        CLASSES_ARE_PUBLIC: "the names of its classes",
        KINDS_ARE_PUBLIC: "the kinds of its columns",
        KEYS_ARE_PUBLIC: "the names of its columns",
    }
    excepted = [what for condition, what in read.items() if condition in data.conditions]
    but = f", except {' and '.join(excepted)}" if excepted else ""
    say(f"Private part: not loaded{but}; {counted(sizes.private_records, unit)} (your estimate).")
    truth = data.public.truth if data.has_public else None
    if data.pays_for_public:
        say("Public part: none; the run pays for releases of the private part and draws rows from them.")
    else:
        say(_part("Public part", sizes.public, truth, data))
    say(_part("Test part", len(data.test), data.test.labels, data))
    for note in dict.fromkeys(str(one.message) for one in notes if one.category is UserWarning):
        say(f"Note: {note}.")
    if data.leaves_out and data.unusable == "leave_out":
        say(f"A run leaves out private records {data.leaves_out.rstrip(',')}, if there are any.")
    return 0


def _part(name: str, count: int, labels: Any, data: PrivatePublicDataModule) -> str:
    """Size of a public part, and its number of labelled examples of each class."""
    if labels is None or not count:
        return f"{name}: {counted(count, 'example') if count else 'none'}."
    attributes = data.task == "multilabel"
    each = range(data.num_classes)
    sizes = [int(((labels[:, one] == 1) if attributes else (labels == one)).sum()) for one in each]
    known = ", ".join(f"{word} {size}" for word, size in zip(data.class_names, sizes, strict=True))
    return f"{name}: {counted(count, 'example')}; {'with attribute' if attributes else 'labelled'}: {known}."
