"""The parser of configurations: jsonargparse's, whose time does not multiply with each class within a class."""

from __future__ import annotations

from collections import deque
from typing import Any

from jsonargparse import ArgumentParser, Namespace

_REMEMBERED = 32


class Parser(ArgumentParser):
    """Parser that adds the defaults of each nested class once; parsers of nested classes are of this class too.

    jsonargparse adds them several times at each level, so that its time grows exponentially with the levels.
    Arguments that have all defaults parse to themselves, so they are left as they are. This does not touch the
    checks: jsonargparse checks nested arguments, and what they import, by parsing them without defaults.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._complete: deque[str] = deque(maxlen=_REMEMBERED)

    def parse_object(
        self,
        obj: Namespace | dict[str, Any],
        namespace: Namespace | None = None,
        env: bool | None = None,
        defaults: bool = True,
        **kwargs: Any,
    ) -> Namespace:
        """See ``jsonargparse.ArgumentParser.parse_object``."""
        # Compared as text: 1 is not True, and arrays can't be compared.
        if defaults and isinstance(obj, Namespace):
            text = repr(obj)
            if text in self._complete and (namespace is None or repr(namespace) == text):
                return obj.clone()
        parsed: Namespace = super().parse_object(obj, namespace, env, defaults, **kwargs)
        if defaults:
            self._complete.append(repr(parsed))
        return parsed
