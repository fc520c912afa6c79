"""Configuration: files of plain data, access by dotted paths, and instantiation by jsonargparse.

Small frozen dataclasses group the arguments of constructors. jsonargparse reads them as sections of YAML; in Python a
mapping may replace them (:func:`as_group`).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import numbers
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import yaml

from pl_privknn._checks import shown

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

#: Largest file that is read: lists of records and exported ledgers are far smaller.
MAX_JSON_BYTES = 1 << 24
#: Largest YAML file: parsing is a hundred times slower than that of JSON.
MAX_YAML_BYTES = 1 << 18
#: Subpackages whose classes YAML may name, bare or by their path.
ROOMS = (
    "callbacks.selection", "datamodules", "features", "labelers", "privacy.mechanisms", "privacy.noise",
    "students", "training",
)  # fmt: skip
# Packages that export these classes, and others; each loads its names when they are first used.
_PACKAGES = (
    "callbacks", "datamodules", "features", "labelers", "privacy", "privacy.mechanisms", "students", "training"
)  # fmt: skip

_TOO_DEEP = "lists and mappings are nested too deep; flatten them"
_MOST_ITEMS = 100  # of a list in a written configuration; longer lists count as data
_MOST_NAMES = 12


class ConfigurationError(ValueError):
    """Invalid configuration; the message is one line with the argument, its value and the remedy."""


# ---------------------------------------------------------------------- files


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader of plain types, with 1e-5 as a number (YAML 1.1 requires a dot) and dates as text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith((":float", ":timestamp"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _side in (_Loader, _Dumper):  # strings that read as numbers are quoted
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
        list("-+.0123456789"),
    )  # fmt: skip


def read_document(path: str | Path) -> Any:
    """Read a JSON or YAML file as plain Python types.

    Raises:
        ConfigurationError: if it is neither, or larger or deeper than :func:`read_yaml` allows.
        OSError: if it can't be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    try:
        if len(data) > MAX_JSON_BYTES:
            raise ConfigurationError(f"more than {MAX_JSON_BYTES >> 20} MiB; split it into several files")
        text = data.decode("utf-8-sig")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            not_json = f"neither JSON ({error}) nor"
        if len(data) > MAX_YAML_BYTES:
            raise ConfigurationError(
                f"{not_json} YAML of at most {MAX_YAML_BYTES >> 10} KiB; make the file smaller"
            )
        document = read_yaml(text)
        if not isinstance(document, list | dict):
            raise ConfigurationError(f"{not_json} a YAML list or mapping")
    except RecursionError:
        raise ConfigurationError(f"{path}: {_TOO_DEEP}") from None
    except ValueError as error:  # also for bytes that are not UTF-8, and numbers with thousands of digits
        raise ConfigurationError(f"{path}: {error}") from None
    return document


def read_yaml(text: str) -> Any:
    r"""Parse one YAML document into plain Python types.

    Aliases are expanded. A section ``definitions`` at the top holds anchors and is removed.

    Raises:
        ConfigurationError: for anything but one document, for tags and too many levels.

    Example:
        >>> from pl_privknn.config import read_yaml
        >>> read_yaml("definitions: {x: &x {k: 4}}\na: *x\nb: [*x]")
        {'a': {'k': 4}, 'b': [{'k': 4}]}
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        content = None if root is None else loader.construct_document(root)
        document = json.loads(json.dumps(content))  # plain data, in which aliases share no list or mapping
    except ConfigurationError:
        raise
    except (yaml.YAMLError, TypeError, ValueError) as error:  # ValueError: numbers with thousands of digits
        raise ConfigurationError(f"not readable as YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigurationError(_TOO_DEEP) from None
    if isinstance(document, dict):
        document.pop("definitions", None)
    return document


def write_yaml(data: Any, flow_style: bool | None = False, width: int = 80) -> str:
    """YAML of plain types, readable by :func:`read_yaml`, in their order and without aliases."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow_style, width=width
    )
    return text


# ---------------------------------------------------------------------- dotted paths


def merged_sections(base: Mapping[str, Any] | None, over: Mapping[str, Any] | None) -> dict[str, Any]:
    """Recursive merge of ``over`` into ``base``.

    A section with another ``class_path`` replaces the earlier one entirely, since its arguments belong to another
    class.
    """
    result = copy.deepcopy(dict(base or {}))
    for name, value in (over or {}).items():
        earlier = result.get(name)
        result[name] = copy.deepcopy(value)
        if isinstance(earlier, dict) and isinstance(value, Mapping):
            known = earlier.get("class_path")
            if value.get("class_path", known) == known:
                result[name] = merged_sections(earlier, value)
    return result


def put(document: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path in place, creating missing sections.

    An item of a list is addressed by its number or by its ``name``.

    Raises:
        ValueError: if the path passes through a value that is neither a section nor a list.
    """
    *sections, last = path.split(".")
    here = document
    for name in sections:
        key = _key(here, name, path)
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict | list):
            raise ValueError(f"{path}: {name} is {shown(here)}, not a section")
    here[_key(here, last, path)] = copy.deepcopy(value)


def get(document: Any, path: str) -> Any:
    """Value at a dotted path, or None where there is none."""
    here = document
    for name in path.split("."):
        try:
            here = here[_key(here, name, path)]
        except (KeyError, TypeError, ValueError):
            return None
    return here


def _key(here: Any, name: str, path: str) -> Any:
    if not isinstance(here, list):
        return name
    names = [item.get("name") if isinstance(item, Mapping) else None for item in here]
    if name.isdigit() and int(name) < len(here):
        return int(name)
    if name not in names:
        raise ValueError(f"{path}: the list has no item {name!r}")
    return names.index(name)


def differences(then: Any, now: Any, path: str = "") -> list[str]:
    """Texts of the differences, one for each dotted path: ``path: … then, … now``."""
    before, after = (dict(enumerate(part)) if isinstance(part, list) else part for part in (then, now))
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        old, new = ("nothing" if part is _NOTHING else repr(part) for part in (then, now))
        return [] if then == now else [f"{path}: {old} then, {new} now"]
    return [
        line
        for name in {**before, **after}
        for line in differences(
            before.get(name, _NOTHING), after.get(name, _NOTHING), f"{path}.{name}".lstrip(".")
        )
    ]


_NOTHING = object()

# ---------------------------------------------------------------------- arguments of classes

_Group = TypeVar("_Group")


def as_group(name: str, given: Any, default: _Group) -> _Group:
    """Convert a group of arguments to its dataclass.

    Args:
        name: name of the argument, for messages.
        given: the dataclass, a mapping of values that differ from the defaults, or None.
        default: the group with the default values.

    Raises:
        ValueError: for another type, or for an unknown argument.
    """
    if isinstance(given, type(default)):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"{name}={shown(given)} must be a group of arguments: {type(default).__name__}(...), or a mapping"
        )
    fields = [field.name for field in dataclasses.fields(default)]  # type: ignore[arg-type]
    if unknown := [key for key in given or {} if key not in fields]:
        raise ValueError(
            f"{name}.{unknown[0]}: there is no such argument; {did_you_mean(unknown[0], fields)}"
        )
    return dataclasses.replace(default, **(given or {}))  # type: ignore[type-var]


def is_group(value: Any) -> bool:
    """Whether a value is a group of arguments, that is, a dataclass whose bases are dataclasses."""
    parents = inspect.getmro(type(value))[:-1]
    return bool(parents) and all(map(dataclasses.is_dataclass, parents))


@functools.cache
def argument_names(owner: type) -> list[str]:
    """Argument names of a constructor, as jsonargparse resolves them; in groups as ``group.name``."""
    names = (action.dest for action in _parser_of((("it", owner),))._actions)
    return [name[3:] for name in names if name.startswith("it.") and not name.endswith(".help")]


class HasInitArguments:
    """Base class that records its constructor's arguments for the ``config.yaml`` of runs from Python.

    Of arrays, modules and other objects only the argument's name is kept, so no data is held or written. Values that
    may be data are not kept either: lists of a user's own class, all arguments of a user's own data module, and
    arguments named ``private…`` except paths; ``private_records`` is a public number.
    """

    #: Whether arguments unknown to this package may contain or select private data.
    _holds_data: ClassVar[bool] = False
    _made_with: tuple[dict[str, Any], list[str]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments, before ``__init__`` is called."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        object.__setattr__(made, "_made_with", _noted(cls, args, kwargs))
        return made

    def __repr__(self) -> str:
        """Call that made the object; data are not shown."""
        section, left_out = as_section(self)
        return _expression(section, [f"{name}=…" for name in left_out if name.isidentifier()])


def as_section(made: HasInitArguments) -> tuple[dict[str, Any], list[str]]:
    """Section of a configuration that describes an object.

    Returns:
        ``class_path`` and ``init_args``, and the names of arguments that they leave out.
    """
    arguments, left_out = made._made_with
    section: dict[str, Any] = {"class_path": f"{type(made).__module__}.{type(made).__qualname__}"}
    return section | ({"init_args": arguments} if arguments else {}), left_out


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a constructor's arguments; classes that YAML may name bare are named so.

    Raises:
        ValueError: for an argument that a configuration can't express.
    """
    left_out: list[str] = []
    try:
        found = {name: _bare(_plain(value, name, left_out, True)) for name, value in arguments.items()}
    except _NotPlain:
        left_out.append("one of them")
    if left_out:
        raise ValueError(f"arguments: a configuration can't express {', '.join(left_out)}")
    return found


def _bare(section: Any) -> Any:
    """Section whose classes are named as briefly as YAML may name them."""
    if isinstance(section, list):
        return [_bare(part) for part in section]
    if not isinstance(section, dict):
        return section
    found = {name: _bare(part) for name, part in section.items()}
    if (path := found.get("class_path")) is not None and path.rpartition(".")[2] in class_names():
        found["class_path"] = path.rpartition(".")[2]
        return found if "init_args" in found else found["class_path"]
    return found


def _expression(value: Any, hidden: Iterable[str] = ()) -> str:
    """Python expression of a plain value; a section becomes a constructor call."""
    if isinstance(value, list):
        return f"[{', '.join(map(_expression, value))}]"
    if not (isinstance(value, dict) and "class_path" in value):
        return repr(value)
    calls = [f"{name}={_expression(part)}" for name, part in value.get("init_args", {}).items()]
    return f"{value['class_path'].rpartition('.')[2]}({', '.join([*calls, *hidden])})"


class _NotPlain(Exception):
    """Raised for a value that a configuration can't express."""


@functools.cache
def _own_arguments(kinds: tuple[type, ...]) -> frozenset[str]:
    """Arguments of the constructors of classes that belong to this package."""
    constructors = [
        vars(kind)["__init__"]
        for kind in kinds
        if kind.__module__.startswith("pl_privknn.") and "__init__" in vars(kind)
    ]
    return frozenset(name for one in constructors for name in inspect.signature(one).parameters)


def _noted(
    cls: type[HasInitArguments], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Plain values of a constructor's arguments, and the names of arguments without a plain value."""
    parameters = inspect.signature(cls.__init__).parameters
    names = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    arguments: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        built_in = name in _own_arguments(cls.__mro__)
        private = (
            name.startswith("private") and name != "private_records" and not isinstance(value, str | Path)
        )
        if isinstance(value, Mapping) and name in parameters and is_group(parameters[name].default):
            value = as_group(name, value, parameters[name].default)  # its fields state which of them are data
        try:
            if private or (cls._holds_data and not built_in):
                raise _NotPlain
            arguments[name] = _plain(value, name, left_out, built_in)
        except _NotPlain:
            left_out.append(name)
    return arguments, left_out


def _plain(value: Any, path: str, left_out: list[str], lists: bool) -> Any:
    """Plain value of an argument; ``lists`` are settings in classes of this package, and may be data elsewhere."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, HasInitArguments) and "<" not in type(value).__qualname__:
        section, missing = as_section(value)
        left_out.extend(f"{path}.{name}" for name in missing)
        return section
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _plain_fields(value, path, left_out, lists)
        path = f"{type(value).__module__}.{type(value).__qualname__}"
        return fields if is_group(value) else {"class_path": path, "init_args": fields}
    if lists and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{path}.{key}", left_out, lists) for key, item in value.items()}
    if lists and isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        return [_plain(item, f"{path}[{place}]", left_out, lists) for place, item in enumerate(value)]
    raise _NotPlain


def _plain_fields(value: Any, path: str, left_out: list[str], lists: bool) -> dict[str, Any]:
    """Plain values of a dataclass's fields that differ from the defaults; a group omits values that are not plain."""
    found = {}
    for field in dataclasses.fields(value):
        inner, needed = getattr(value, field.name), field.default is dataclasses.MISSING
        # Fields of noise that the labeler sets are not stated, and fields without repr are data.
        if not field.init or field.name in getattr(value, "_unstated", ()):
            continue
        if not (field.repr or inner is None or isinstance(inner, str | Path)):
            raise _NotPlain
        try:
            if needed or inner != field.default:
                found[field.name] = _plain(inner, f"{path}.{field.name}", left_out, lists)
        except _NotPlain:
            if needed or not is_group(value):
                raise
            left_out.append(f"{path}.{field.name}")
    return found


# ---------------------------------------------------------------------- objects


@functools.cache
def class_names() -> dict[str, str]:
    """Module of each class of this package that YAML may name bare; the classes are not imported."""
    found: dict[str, str] = {}
    for room in _PACKAGES:
        package = importlib.import_module(f"pl_privknn.{room}")  # loads its names lazily
        found |= {name: package.__name__ for name in package.__all__ if name[0].isupper()}
    return found


def known_class(path: str) -> type | None:
    """Class of this package that YAML may name, bare or by its import path; None for other names."""
    module, _, name = path.rpartition(".")
    module = module or class_names().get(name, "")
    packages = ("pl_privknn", *(f"pl_privknn.{package}" for package in _PACKAGES))
    if module not in packages and not _in_rooms(module):
        return None
    found = _imported(module, name)
    return found if found is not None and _in_rooms(found.__module__) else None


def class_named(path: str) -> type | None:
    """Class named in YAML: of this package, or imported by its path; None if not found."""
    module, _, name = path.rpartition(".")
    return known_class(path) or (_imported(module, name) if module else None)


def _imported(module: str, name: str) -> type | None:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def import_named(content: Any) -> None:
    """Import the classes of this package that texts name bare, so that parsers find them."""
    for word in set(re.findall(r"\w+", str(content))).intersection(class_names()):
        known_class(word)


class Built(NamedTuple):
    """Objects of a configuration.

    Attributes:
        data: the data module; None without a section.
        module: the LightningModule; None without a section.
        callbacks: ``PrivateLabeler`` of the section ``labeling``, if there is one, and those of the trainer.
    """

    data: Any
    module: Any
    callbacks: list[Any]


def build(document: Mapping[str, Any], *, own_code: bool = True, data: Any = None) -> Built:
    """Objects of the sections ``data``, ``model``, ``labeling`` and ``trainer.callbacks`` of a configuration.

    Classes, task and image size of a module whose class asks for them are those of the data.

    Args:
        document: the configuration, of plain types; what it lacks is not made.
        own_code: allow classes of other packages, whose code then runs; not for files from an untrusted source.
        data: the data module, if it is already made.

    Raises:
        ConfigurationError: for a section that does not parse, or names a class that is not allowed.
    """
    from pl_privknn import _lightning as pl

    callbacks = get(document, "trainer.callbacks") or []
    sections = {
        **{name: document[name] for name in ("data", "model", "labeling") if document.get(name) is not None},
        **{
            f"trainer.callbacks.{place}": part
            for place, part in enumerate(callbacks if isinstance(callbacks, list) else [callbacks])
        },
    }
    if not own_code:
        check_own_classes(sections)
    if data is None and "data" in sections:
        data = _of_class("data", sections.pop("data"), pl.accepted("LightningDataModule"))
    module, made = None, []
    for name, section in sections.items():
        if name == "model":
            module = _of_class(name, _linked(section, data), pl.accepted("LightningModule"))
        elif name == "labeling":
            labeler = importlib.import_module("pl_privknn.callbacks.private_labeler").PrivateLabeler
            made.append(instantiate({name: section}, {name: labeler}).labeling)
        elif name != "data":
            made.append(_of_class(name, section, pl.accepted("Callback")))
    return Built(data, module, made)


def _linked(section: Any, data: Any) -> Any:
    """Section of a module, completed by arguments that follow from the data."""
    name = section.get("class_path") if isinstance(section, Mapping) else section
    made = class_named(str(name))
    if made is None or data is None:
        return section
    networks = importlib.import_module("pl_privknn.networks.base")
    shape = networks.network_arguments(data.image_shape)
    stated = {"num_classes": data.num_classes, "task": data.task, **shape}
    asked = argument_names(made)
    given = section.get("init_args") if isinstance(section, Mapping) else None
    known = {key: value for key, value in stated.items() if key in asked}
    return {"class_path": name, "init_args": {**(given or {}), **known}}


def _of_class(name: str, section: Any, kinds: tuple[type, ...]) -> Any:
    """Object of a section with ``class_path`` and ``init_args``, whose class derives from one of ``kinds``."""
    parser, key = _parser(), name.split(".")[-2] if name.startswith("trainer.") else name
    parser.add_subclass_arguments(kinds, key, fail_untyped=False)
    options = [action.dest for action in parser._actions]
    return _parsed(parser, {key: section}, options, name)[key]


def instantiate(sections: Mapping[str, Any], classes: Mapping[str, type], own_code: bool = True) -> Namespace:
    """Instantiate each class from its section, with type checks and nested classes.

    Args:
        sections: arguments of each class.
        classes: the classes, under the names of their sections.
        own_code: see :func:`build`.

    Raises:
        ConfigurationError: for a section that does not fit its class.
    """
    for name in classes:
        if not isinstance(sections.get(name), Mapping):
            raise ConfigurationError(f"{name}={shown(sections.get(name))} must be a section of arguments")
    given = {name: dict(sections[name]) for name in classes}
    if not own_code:
        check_own_classes(given)
    names = [f"{name}.{inner}" for name, made in classes.items() for inner in argument_names(made)]
    return _parsed(_parser_of(tuple(classes.items())), given, names)


def _parsed(
    parser: ArgumentParser, sections: dict[str, Any], options: Collection[str], name: str = ""
) -> Any:
    """Parse and instantiate plain sections, which are not modified."""
    from jsonargparse import ArgumentError

    import_named(sections)
    try:
        return parser.instantiate(parser.parse_object(copy.deepcopy(sections)))
    except ConfigurationError:
        raise
    except (ArgumentError, ArithmeticError, ValueError, TypeError, KeyError) as error:
        text = one_line(error, options)
        raise ConfigurationError(text if text.startswith(name) else f"{name}: {text}") from error


def check_own_classes(section: Any, place: str = "") -> None:
    """Refuse a section that names code outside this package's classes, before any of it is imported.

    ``privknn fit`` runs the code that a configuration names; commands that compute its cost do not. A parser may
    import any text that is a dotted path, also within a text that is YAML itself.

    Args:
        section: plain data.
        place: dotted path of the section, for messages.

    Raises:
        ConfigurationError: at such a text.
    """
    if isinstance(section, Mapping | list):
        for name, value in section.items() if isinstance(section, Mapping) else enumerate(section):
            check_own_classes(value, f"{place}.{name}".lstrip("."))
    elif isinstance(section, str):
        if _names_code(section) and known_class(section) is None:
            raise ConfigurationError(
                f"{place}: importing {shown(section)} is not allowed; a file's cost is stated without running other "
                "code, so run privknn fit and audit its ledger, or write the name of a file as ./NAME"
            )
        try:
            inner = read_yaml(section)
        except ConfigurationError:
            return
        if inner != section:
            check_own_classes(inner, place)


def _names_code(text: str) -> bool:
    """Whether a text is a dotted path whose first part can be imported."""
    names = text.split(".")
    if len(names) < 2 or not all(map(str.isidentifier, names)):
        return False
    return names[0] in sys.modules or importlib.util.find_spec(names[0]) is not None


def _parser() -> ArgumentParser:
    """Parser of configurations that reads and writes YAML as this module does."""
    from pl_privknn._parsing import Parser

    set_yaml()
    return Parser(exit_on_error=False)


@functools.cache
def set_yaml() -> None:
    """Let every parser of jsonargparse read and write YAML as this module does."""
    from jsonargparse import set_dumper, set_loader

    set_loader("yaml", read_yaml, (ConfigurationError,))
    set_dumper("yaml", write_yaml)


@functools.lru_cache(maxsize=16)
def _parser_of(classes: tuple[tuple[str, type], ...]) -> ArgumentParser:
    parser = _parser()
    for name, made in classes:
        # Arguments without a type are accepted; files within files are not read.
        parser.add_class_arguments(made, name, fail_untyped=False)
    return parser


def _in_rooms(module: str) -> bool:
    return any(module == f"pl_privknn.{room}" or module.startswith(f"pl_privknn.{room}.") for room in ROOMS)


# ---------------------------------------------------------------------- messages


def did_you_mean(name: str, candidates: Iterable[str], what: str = "known are") -> str:
    """Remedy for an unknown name: the most similar candidate, or the list of candidates."""
    names = sorted(set(candidates), key=str.lower)
    by_last = {name.rsplit(".", 1)[-1].lower(): name for name in reversed(names)}
    by_last |= {name.lower(): name for name in names}
    if close := difflib.get_close_matches(str(name).lower(), list(by_last), n=1, cutoff=0.6):
        return f"did you mean {by_last[close[0]]}?"
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{what} {', '.join(names[:_MOST_NAMES])}{more}" if names else "leave it out"


def one_line(error: BaseException, options: Collection[str] = ()) -> str:
    """Message of an error in one line; for a parser's error, without the list of rejected types.

    Args:
        error: any error, such as a parser's.
        options: names of the command's options, for suggestions.
    """
    from jsonargparse import ArgumentError

    keys: list[str] = []
    names: Collection[str] = options
    while "\n" in str(error) and error.__cause__ is not None:  # the parser's error, which wraps the cause
        _, *key = str(error).splitlines()[0].split('"')
        keys += [key[0]] if key and key[0] not in keys[-1:] else []
        owners = filter(None, map(known_class, str(error).splitlines()[0].split("'")))
        names = next((argument_names(owner) for owner in owners), names)
        error = error.__cause__
    parsed = bool(keys) or isinstance(error, ArgumentError)
    text = str(error).split("\n")[0] if parsed else " ".join(str(error).split())
    where = f"{'.init_args.'.join(keys)}: " if keys else ""
    return f"{where}{text or type(error).__name__}{_remedy(error, text, names) if parsed else ''}"


def _remedy(error: BaseException, text: str, names: Collection[str]) -> str:
    """Remedy for an error of jsonargparse, whose text states the fault."""
    if isinstance(error, ModuleNotFoundError):
        return f"; put {error.name}.py into the configuration's folder, or install its package"
    if "Expected an instantiatable class" in text or "Not a valid subclass" in text:
        return "; a class is named by class_path, and its arguments go into init_args: {NAME: VALUE}"
    for before in ("import path string:", "ption '", "nrecognized arguments:"):
        if unknown := text.partition(before)[2].strip(" -"):
            names = [*class_names()] if "import" in before else names
            return f"; {did_you_mean(unknown.replace(chr(39), ' ').replace('=', ' ').split()[0], names)}"
    return ""
