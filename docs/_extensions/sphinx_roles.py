"""For the API reference: Sphinx roles in docstrings become links, or plain code where the page has no such name.

``Example:`` becomes ``Examples:``, the heading under which mkdocstrings shows code as code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")


class SphinxRoles(Extension):
    """Rewrites ``:class:`~a.b.C``` of every docstring to an optional cross-reference to ``a.b.C``."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = ROLE.sub(lambda match: _reference(obj, *match.groups()), text)


def _reference(scope: Object, short: str, name: str) -> str:
    shown = (name.rpartition(".")[2] if short else name).replace("_", "&#95;")  # no emphasis
    return f'<autoref optional identifier="{_full(scope, name)}"><code>{shown}</code></autoref>'


def _full(scope: Object, name: str) -> str:
    """The dotted path of a name as it is seen from a class, a function or a module."""
    if name.startswith("pl_privknn."):
        return name
    first, dot, rest = name.partition(".")
    place: Any = scope
    while place is not None:
        if first in place.members:
            member = place.members[first]
            return (member.target_path if member.is_alias else member.path) + dot + rest
        place = place.parent
    return name
