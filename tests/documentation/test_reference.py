"""Each class that YAML may name has an entry in the API reference, and its docstring says what its arguments are."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from pl_privknn.config import known_classes

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api"
# Not what data modules raise, which is exported beside them, nor protocols, of which nothing is made.
NAMED = sorted(
    {
        found
        for found in known_classes().values()
        if not issubclass(found, Exception) and not getattr(found, "_is_protocol", False)
    },
    key=lambda found: found.__qualname__,
)


def _shown():
    """Classes and functions of the pages' directives, and what their modules export."""
    for page in PAGES.glob("*.md"):
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            parent, _, name = path.rpartition(".")
            found = getattr(importlib.import_module(parent), name, None)
            if found is not None and not inspect.ismodule(found):
                yield found
                continue
            module = importlib.import_module(path)
            own = [one for one, value in vars(module).items() if getattr(value, "__module__", "") == path]
            yield from (vars(module).get(one) for one in getattr(module, "__all__", own) if one[0] != "_")


def test_every_class_of_configurations_has_an_entry():
    shown = list(_shown())
    assert [found.__qualname__ for found in NAMED if found not in shown] == []


@pytest.mark.parametrize("found", NAMED, ids=lambda found: found.__name__)
def test_its_docstring_explains_each_argument(found):
    ours = [parent for parent in found.__mro__ if parent.__module__.startswith("pl_privknn")]
    text = "\n".join(inspect.getdoc(parent) or "" for parent in ours)
    own = (parent.__init__ for parent in ours if "__init__" in vars(parent))
    taken = inspect.signature(next(own)).parameters if found.__init__ is not object.__init__ else {}
    wanted = [
        name for name in taken if name != "self" and not re.search(rf"^\s*\**{name}:", text, re.MULTILINE)
    ]
    assert wanted == []
