"""Each class that YAML may name has an entry in the API reference, and its docstring says what its arguments are."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from pl_privknn.config import known_classes

PAGES = Path(__file__).resolve().parents[2] / "docs" / "_extensions" / "api.yaml"
ROOMS = yaml.safe_load(PAGES.read_text(encoding="utf-8"))
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
    """Classes and functions that the pages name, and what modules without names export."""
    for page in (page for room in ROOMS.values() for page in room["pages"]):
        for path, names in page.items():
            if path in ("title", "text"):
                continue
            module = importlib.import_module(f"pl_privknn.{path}")
            own = [
                one
                for one, value in vars(module).items()
                if getattr(value, "__module__", "") == module.__name__
            ]
            shown = names or [one for one in getattr(module, "__all__", own) if one[0] != "_"]
            yield from (getattr(module, name) for name in shown)


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
