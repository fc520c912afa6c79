"""A node's own record of what it answered, on its own disk: each round once, and never beyond its own budget."""

from __future__ import annotations

import json
import math
from pathlib import Path

from filelock import FileLock

from pl_privknn._files import write_durably
from pl_privknn.federated.messages import Refused

#: What rounding of a sum may take a total beyond a budget by.
_ROUNDING = 1e-9


class AnsweredRounds:
    """Rounds that a node answered, and the ε that each of its records spent on them.

    ε of pure guarantees adds up, however later rounds were chosen in view of earlier answers, so that no filter is
    needed. The file is on disk before :meth:`spend` returns, and other processes wait meanwhile.

    Args:
        path: the file, made if missing. Whoever deletes it, or puts back an older copy, forgets what was spent.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def spend(self, name: str, epsilon: float, budget: float) -> None:
        """Note an answer, before anything is drawn for it.

        Raises:
            Refused: if the round was answered, or the total would pass the budget; nothing is noted then.
            ValueError: if the file is no such record.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            known = self._read()
            if name in known:
                raise Refused(f"round={name!r} was answered by this node; it answers a round once")
            if math.fsum([*known.values(), epsilon]) > budget * (1 + _ROUNDING):
                raise Refused(f"epsilon={epsilon:g} would pass this node's own budget max_epsilon={budget:g}")
            write_durably(self.path, json.dumps({**known, name: epsilon}, indent=0), mode=0o600)

    @property
    def spent(self) -> float:
        """ε of all rounds together."""
        return math.fsum(self._read().values())

    def _read(self) -> dict[str, float]:
        if not self.path.exists():
            return {}
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            sound = all(isinstance(spent, float | int) and spent >= 0 for spent in known.values())
        except (ValueError, AttributeError):
            sound = False
        if not sound:
            raise ValueError(
                f"{self.path} is no record of answered rounds; restore it: without it, ε would be wrong"
            )
        return {str(name): float(spent) for name, spent in known.items()}
