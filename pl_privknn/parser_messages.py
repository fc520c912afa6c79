"""What a parser of configuration says of a mistake, in one line: the key, the value, what is wanted, a likely name.

jsonargparse tells of every type that a value could have had, and quotes whole sections. A reader wants the one word
that is wrong.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pl_privknn.argument_groups import argument_names

_MOST_NAMES = 12


def in_one_line(
    error: BaseException,
    options: Collection[str] = (),
    classes: Callable[[], Mapping[str, type]] = dict,
) -> str:
    """The message of an error without line breaks; that of a parser shortened to what is wrong and what is wanted.

    Args:
        error: of a parser, or any other.
        options: names of the command's options, for a key that is none of them.
        classes: gives the classes that may be named, for a name where nothing says of which kind it has to be.
    """
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    if (unknown := _unknown_option(" ".join(lines), options)) is not None:
        return unknown
    if not any(line.startswith(_OF_PARSERS) for line in lines):
        return " ".join(part for line in lines for part in line.split()) or type(error).__name__
    found = _read(lines)
    return _wrong_name(found, lines, classes) or _wrong_value(found)


def did_you_mean(name: str, candidates: Iterable[str], what: str = "known are") -> str:
    """A remedy for a name that is unknown: the one that is most like it, or all of them if they are few."""
    names = sorted(set(candidates), key=str.lower)
    by_last = {name.rsplit(".", 1)[-1].lower(): name for name in reversed(names)}
    by_last |= {name.lower(): name for name in names}
    if close := difflib.get_close_matches(name.lower(), list(by_last), n=1, cutoff=0.6):
        return f"did you mean {by_last[close[0]]}?"
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"{what} {', '.join(names[:_MOST_NAMES])}{more}" if names else "leave it out"


class _Found(NamedTuple):
    """What a parser's message tells.

    Attributes:
        key: dotted path of the value in the configuration.
        given: the innermost value, as the parser prints it.
        wanted: what could have stood there.
        owner: the class whose arguments were read last.
    """

    key: str
    given: str
    wanted: list[str]
    owner: str


def _read(lines: list[str]) -> _Found:
    keys: list[str] = []
    owner, given, wanted = "", "", []
    for line in lines:
        if match := re.match(r'Parser key "(.+?)":\s*(.*)', line):
            if not given:
                keys += (["init_args"] if keys and owner else []) + [match[1]]
            line = match[2]
        if match := re.match(r"Problem with given class_path '(.+?)'", line):
            owner = owner if given else match[1]
        value = re.match(r"(.*?)\.? ?(?:Got|Given) value: (.*)", line)
        if value is not None:
            line, given = value[1], given or value[2]
        for pattern, words in _REWORDED:
            line = re.sub(pattern, words, line)
        if line and not line.startswith(_NOISE) and line not in wanted:
            wanted.append(line)
    key = ".".join(keys)
    if nested := re.match(r"NestedArg\(key='(.*?)', val=(.*)\)", given):
        key, given = f"{key}.{nested[1]}", nested[2]
    return _Found(key, given, wanted, owner)


def _wrong_name(found: _Found, lines: list[str], classes: Callable[[], Mapping[str, type]]) -> str | None:
    """The line for a class or an argument that does not exist; None where the names are right."""
    given = _literal(found.given)
    if isinstance(given, dict) and isinstance(given.get("class_path"), str):
        for name in given.keys() - _OF_CLASSES:
            return f"{found.key}.{name}: arguments of a class stand in its init_args; write init_args: {{{name}: …}}"
    for line in lines:
        if match := re.match(r"Expected a dot import path string: (\S+)", line):
            key = f"{found.key}.class_path" if isinstance(given, dict) else found.key
            names = [name for base in _bases(lines) for name in _names_below(base)]
            remedy = did_you_mean(match[1], names or [name for name in classes() if "." not in name])
            return f"{key}={match[1]}: no class has this name; {remedy} {_ELSEWHERE}"
        if match := re.match(
            r"(?:Group '(.+?)' does not accept o|O)ption '(.+?)'(?: is not accepted)?$", line
        ):
            return _wrong_argument(found, match[1], match[2])
        if match := re.match(r".*No module named '(.+?)'", line):
            return (
                f"{found.key}={_cut(_class_path(found.given))}: there is no module {match[1]}; put {match[1]}.py "
                "beside the configuration, or install its package"
            )
    return None


def _wrong_argument(found: _Found, group: str | None, name: str) -> str:
    owner = _loaded(found.owner)
    names = [] if owner is None else argument_names(owner)
    given = _literal(found.given)
    inside = given.get("init_args", given) if isinstance(given, dict) else {}
    if group is not None:
        inside = inside.get(group) or {}
        names = [full for full in names if full.startswith(f"{group}.")]
    dotted = f"{group}.{name}" if group is not None else name
    key = (
        found.key
        if found.key.rsplit(".", 1)[-1] == name
        else ".".join([found.key, *(["init_args"] if "init_args" in (given or {}) else []), dotted])
    )
    value = f"={_cut(str(inside[name]))}" if isinstance(inside, dict) and name in inside else ""
    if not value and found.key == key and found.given:
        value = f"={_cut(found.given)}"
    title = found.owner.rsplit(".", 1)[-1] or "this section"
    return f"{key}{value}: {title} has no argument {dotted!r}; {did_you_mean(dotted, names, 'it takes')}"


def _wrong_value(found: _Found) -> str:
    text = ", or ".join(found.wanted) or "is not what is wanted here"
    given = f"={_cut(found.given)}" if found.given else ""
    return f"{found.key}{given}: {text}" if found.key else text


def _unknown_option(text: str, options: Collection[str]) -> str | None:
    """The line for a key, or a word of the command line, that is no option of the command."""
    match = re.match(r"Subcommand '\w+' does not accept option '(.+?)'", text) or re.match(
        r"[Uu]nrecognized arguments: --([^\s=]+)", text
    )
    if match is None or not options:
        return None
    return f"{match[1]}: there is no such option; {did_you_mean(match[1], options, 'options are')}"


def _bases(lines: list[str]) -> list[type]:
    """The classes that the innermost value may be an instance of."""
    listed = [line for line in lines if line.startswith("Subtypes: ")]
    paths = re.findall(r"(?:class '|\[|\| )([A-Za-z_][\w.]*\.\w+)", listed[-1]) if listed else []
    return [found for found in map(_loaded, dict.fromkeys(paths)) if found is not None]


def _names_below(base: type) -> list[str]:
    """Names of the public classes that derive from a class."""
    children: list[type] = base.__subclasses__()
    names = [name for child in children for name in _names_below(child)]
    own = base.__name__
    return names if own.startswith("_") or inspect.isabstract(base) else [own, *names]


def _loaded(path: str) -> type | None:
    """A class by its path, if something imported it already."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _class_path(given: str) -> str:
    match = re.search(r"class_path'?[:=] ?'([\w.]+)'", given)
    return match[1] if match else given


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:80]}…"


_OF_CLASSES = {"class_path", "init_args", "dict_kwargs"}
_ELSEWHERE = "A class of another package needs its whole path, as in my_package.MyClass"
_OF_PARSERS = (
    "Parser key",
    "Does not validate against any",
    "Problem with given class_path",
    "Given value type",
)
_REWORDED = (
    (r"Expected an? <class '([\w.]+)'>", r"want \1"),
    (r"Expected an? typing\.Literal\[(.*)\]", r"want one of \1"),
    (r"Expected an? (\S+\[.*\])", r"want \1"),
)
_NOISE = (
    "Does not validate against any", "Problem with given class_path", "Subtypes:", "Errors:", "want NoneType",
    "Expected a path but", "Given value type", "Subclass types expect one of", "a class path (str)", "a dict with",
    "a dict without",
)  # fmt: skip
