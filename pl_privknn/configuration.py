"""Classes that configuration may name, and the parser that makes them.

Whoever runs ``privknn fit`` runs the code that the configuration names. Whoever asks what a file would cost does
not: :func:`project_classes_only` lets the project's own classes through and refuses all others before anything is
imported.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_dumper, set_loader

from pl_privknn._checks import shown
from pl_privknn.documents import DocumentError, check_yaml, read_yaml, write_yaml, written_out
from pl_privknn.parser_messages import in_one_line

#: Rooms whose classes YAML may name, bare or by their path.
ROOMS = (
    "baselines",
    "callbacks.selection",
    "datamodules",
    "features",
    "labelers",
    "privacy.mechanisms",
    "privacy.noise",
    "students",
    "training",
)


class ConfigurationError(ValueError):
    """Configuration that can't be used; the message is one line with the argument, its value and what is wanted."""


@functools.cache
def known_classes() -> dict[str, type]:
    """The project's classes by every name that YAML may use: bare, and by the paths that lead to them.

    The rooms are imported, which makes the bare names known to every parser of jsonargparse too.
    """
    known: dict[str, type] = {}
    for room in ROOMS:
        module = importlib.import_module(f"pl_privknn.{room}")
        for name, found in vars(module).items():
            if isinstance(found, type) and _in_rooms(found.__module__) and not name.startswith("_"):
                paths = (name, f"{module.__name__}.{name}", f"pl_privknn.{name}")
                for path in (*paths, f"{found.__module__}.{found.__qualname__}"):
                    known.setdefault(path, found)
    return known


def class_named(class_path: str) -> type | None:
    """The class that YAML names: the project's, or another's by its path, which is imported; None for neither."""
    if (known := known_classes().get(class_path)) is not None:
        return known
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def project_classes_only(section: Any, where: str, unmade: Collection[str] = ()) -> Any:
    """A copy of plain data in which every class is the project's own, under its full path.

    Args:
        section: lists, mappings and values, as :func:`~pl_privknn.documents.read_document` gives them.
        where: its place, for messages.
        unmade: keys of which nothing will be made, so that other text than a ``class_path`` is only text there.

    Raises:
        ConfigurationError: for a ``class_path`` that is not in :func:`known_classes`, and for any other text that
            names code outside the project. Nothing outside it is imported on the way.
    """
    return _checked(section, where, frozenset(unmade), made=True)


def _checked(section: Any, where: str, unmade: frozenset[str], made: bool) -> Any:
    if isinstance(section, Mapping):
        if dotted := [key for key in section if not isinstance(key, str) or "." in key]:
            raise ConfigurationError(
                f"{where}: {shown(dotted[0])} must be a plain word; nest sections instead"
            )
        return {
            key: _own_path(item, f"{where}.{key}")
            if key == "class_path"
            else _checked(item, f"{where}.{key}", unmade, made and key not in unmade)
            for key, item in section.items()
        }
    if isinstance(section, list):
        return [_checked(item, f"{where}[{place}]", unmade, made) for place, item in enumerate(section)]
    if isinstance(section, str) and made:
        _check_text(section, where)
    return section


def instantiate(sections: Mapping[str, Any], classes: Mapping[str, type]) -> Namespace:
    """Make one object of each class from its section, with types checked and nested classes made.

    Args:
        sections: arguments of each class.
        classes: the classes, under the names of their sections.

    Raises:
        ConfigurationError: for a section that does not fit its class.
    """
    for name in classes:
        if not isinstance(sections.get(name), Mapping):
            raise ConfigurationError(f"{name}={shown(sections.get(name))} must be a section of arguments")
    parser = _parser_of(tuple(classes.items()))
    try:
        return made_by(parser, {name: dict(sections[name]) for name in classes})
    except (ArgumentError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(one_line(error)) from error


def made_by(parser: ArgumentParser, sections: dict[str, Any]) -> Namespace:
    """What a parser makes of plain sections, by jsonargparse's name for it before and after version 4.49."""
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    # A copy: the parser changes what lies inside lists.
    made: Namespace = make(parser.parse_object(copy.deepcopy(sections)))
    return made


@functools.lru_cache(maxsize=16)
def _parser_of(classes: tuple[tuple[str, type], ...]) -> ArgumentParser:
    known_classes()
    parser = ArgumentParser(exit_on_error=False)
    for name, made in classes:
        # Arguments without a type are let through; files within files are not read.
        parser.add_class_arguments(made, name, fail_untyped=False)
    return parser


def one_line(error: BaseException, options: Collection[str] = ()) -> str:
    """The message of an error in one line; see :func:`~pl_privknn.parser_messages.in_one_line`."""
    return in_one_line(error, options, known_classes)


def strict_yaml() -> None:
    """Let jsonargparse read what :func:`~pl_privknn.documents.check_yaml` lets through, and write such YAML."""
    load = get_loader("yaml")
    if getattr(load, "strict", False):
        return

    def load_strictly(text: str) -> Any:
        check_yaml(text)
        return written_out(load(text))

    load_strictly.strict = True  # type: ignore[attr-defined]
    set_loader("yaml", load_strictly, (yaml.YAMLError, DocumentError))
    set_dumper("yaml", write_yaml)


def _in_rooms(module: str) -> bool:
    return any(module == f"pl_privknn.{room}" or module.startswith(f"pl_privknn.{room}.") for room in ROOMS)


def _own_path(name: Any, where: str) -> str:
    found = _own_class(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigurationError(
            f"{where}={shown(name)} is not a class of this project; a file's cost is stated without running other "
            "code, so run privknn fit and audit the run's ledger instead"
        )
    return f"{found.__module__}.{found.__qualname__}"


def _own_class(path: str) -> type | None:
    """A class of the project by its name, or by its path also where its room does not offer it by name."""
    if "." in path and not path.startswith("pl_privknn."):
        return None
    if (known := known_classes().get(path)) is not None:
        return known
    module, _, name = path.rpartition(".")
    found = class_named(path) if _in_rooms(module) and name.isidentifier() else None
    return found if found is not None and _in_rooms(found.__module__) else None


def _check_text(text: str, where: str) -> None:
    """Refuse text that a parser could take for code: a dotted name, or YAML within text."""
    name = text.strip().strip("'\"")
    parts = name.split(".")
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        if _own_class(name) is None and _importable(parts[0]):
            raise ConfigurationError(
                f"{where}={shown(text)} names code outside this project, or reads like it; write ./{name} where it "
                "is a path"
            )
        return
    try:
        inner = read_yaml(text)
    except DocumentError:
        return  # no YAML, so no parser makes more of it than text
    if isinstance(inner, Mapping | list):
        project_classes_only(inner, f"the text of {where}")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # __main__, and modules made by hand: they are loaded already
        return True
