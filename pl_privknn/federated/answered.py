"""A node's own record of what it answered, on its own disk: each round once, and never beyond its own budget."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from pl_privknn.federated.messages import Refused
from pl_privknn.privacy.private_store import PrivateStore

_SCHEMA = "CREATE TABLE rounds (name TEXT PRIMARY KEY, epsilon REAL NOT NULL);"
_WAIT = 600.0  # seconds, for another process of this node
#: What rounding of a sum may take a total beyond a budget by.
_ROUNDING = 1e-9


class AnsweredRounds:
    """Rounds that a node answered, and the ε that each of its records spent on them.

    ε of pure guarantees adds up, however later rounds were chosen in view of earlier answers, so that no filter is
    needed. What is spent is on disk before :meth:`spend` returns, and other processes wait meanwhile.

    Args:
        path: an SQLite file, made if missing; see :class:`~pl_privknn.privacy.private_store.PrivateStore`. Whoever
            deletes it, or puts back an older copy, forgets what was spent.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def spend(self, name: str, epsilon: float, budget: float) -> None:
        """Note an answer, before anything is drawn for it.

        Raises:
            Refused: if the round was answered, or the total would pass the budget; nothing is noted then.
            PrivateStoreError: if the file is no such record.
        """
        with self._opened() as store, store.writing() as db:
            known = dict(db.execute("SELECT name, epsilon FROM rounds"))
            if name in known:
                raise Refused(f"round={name!r} was answered by this node; it answers a round once")
            if math.fsum([*known.values(), epsilon]) > budget * (1 + _ROUNDING):
                raise Refused(f"epsilon={epsilon:g} would pass this node's own budget max_epsilon={budget:g}")
            db.execute("INSERT INTO rounds VALUES (?, ?)", (name, epsilon))

    @property
    def spent(self) -> float:
        """ε of all rounds together."""
        if not self.path.exists():
            return 0.0
        with self._opened() as store:
            return math.fsum(epsilon for (epsilon,) in store.read("SELECT epsilon FROM rounds"))

    def _opened(self) -> contextlib.closing[PrivateStore]:
        return contextlib.closing(PrivateStore(self.path, _SCHEMA, wait=_WAIT))
