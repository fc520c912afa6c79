"""Client of federated reverse kNN: checks of a request, and messages of private records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.features.alone import kept_apart
from pl_privknn.features.base import Extractor
from pl_privknn.features.private_records import PrivateRecords, check_table, made_up
from pl_privknn.federated.messages import TRUSTS, Refused, Request, encode, extractor_digest, seal
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.persons import check_owners
from pl_privknn.privacy.private_store import PrivateStore
from pl_privknn.privacy.same_table import same_table

_SCHEMA = "CREATE TABLE rounds (name TEXT PRIMARY KEY, epsilon REAL NOT NULL);"
_RECORDS = "records"  # fact about the node's table
_WAIT = 600.0  # seconds, for another process of this node
#: What rounding of a sum may take a total beyond a budget by.
_ROUNDING = 1e-9


class AnsweredRounds:
    """Rounds that a node answered, and the ε that each of its records spent on them.

    ε of pure guarantees adds up, however later rounds were chosen in view of earlier answers, so that no filter is
    needed. What is spent is on disk before :meth:`spend` returns, and other processes wait meanwhile.

    Args:
        path: an SQLite file by its absolute path, made if missing; see
            :class:`~pl_privknn.privacy.private_store.PrivateStore`. Deleting it, or restoring an older copy,
            forgets what was spent.
        table: tensors of the node's records. The file keeps a digest of them under a random key, and refuses other
            records; none for a node without records.

    Raises:
        ValueError: for a relative path, which would name another file after each start elsewhere.
    """

    def __init__(self, path: str | Path, table: Sequence[Tensor] = ()) -> None:
        self.path, self._table = Path(path), table
        if not self.path.is_absolute():
            raise ValueError(
                f"record={str(path)!r} is relative, so a start from another directory would forget what was spent; "
                "give an absolute path"
            )

    def spend(self, name: str, epsilon: float, budget: float) -> None:
        """Note an answer before any noise is drawn for it.

        Raises:
            Refused: if the round was answered, or the total would pass the budget; nothing is noted then.
            PrivateStoreError: if the file is no such record.
        """
        with self._opened() as store, store.writing() as db:
            begun = store.fact(_RECORDS) is not None
            if self._table and not same_table(store, _RECORDS, self._table, begun):
                raise Refused(
                    f"record={str(self.path)!r} counts what other records spent; each node and table needs its own "
                    "file"
                )
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


class Client:
    """One node's private records, budget and list of answered rounds.

    Under ``"local"`` trust its records' privacy rests on this class alone. Whatever a server asks, each message is
    noised here, by the ε that the request names; that ε is added up in a file here, and a request that would pass
    ``max_epsilon``, or whose round was answered, is refused. What is refused depends on nothing private.

    Args:
        images: float32 ``(n, channels, height, width)``; features ``(n, d)`` where ``extractor`` is a name.
        labels: int64 ``(n,)``.
        num_classes: c. Fixed here: a server that could choose it would learn from a refusal which labels there are.
        extractor: the public extractor that was agreed upon, or a name for the features as they are.
        max_epsilon: the most that all answers together may cost a record, counted in pure ε of what this node sends,
            without shuffling.
        record: the absolute path of a file that lasts, one for each node and its records; see
            :class:`~pl_privknn.federated.client.AnsweredRounds`.
        trust: the only kind of request that is answered: ``"local"`` or ``"shuffle"``.
        max_message_epsilon: the most that one answer may cost; by default ``max_epsilon``.
        shuffler_key: under ``"shuffle"``, the public key of the shuffler, 32 bytes. Get it from the operator of
            that node, never by way of the server.
        noise_source: the operating system's generator; seeded ones are for tests.
        private_groups: int64 ``(n,)``, the person of each record, where the unit of privacy is a person: one record
            of each, drawn by a private coin, makes the person's message in a round. A node that is one person gives
            the same number to all records. No person may have records with two nodes.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> import tempfile, torch
        >>> from pl_privknn.federated import Client, Refused, Request
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = torch.eye(2), torch.tensor([0, 1])
        ...     client = Client(*records, 2, "corners", max_epsilon=0.5, record=f"{folder}/answered.sqlite")
        ...     asked = Request.about(torch.eye(2), round="a", epsilon=0.5, num_classes=2, extractor=client.extractor)
        ...     print(len(client.answer(asked)), "bytes,", client.answered.spent)
        ...
        18 bytes, 0.5
    """

    role = "client"

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        extractor: Extractor | str,
        *,
        max_epsilon: float,
        record: str | Path,
        trust: str = "local",
        max_message_epsilon: float | None = None,
        shuffler_key: bytes | None = None,
        noise_source: NoiseSource | None = None,
        private_groups: Tensor | None = None,
    ) -> None:
        self.trust = check_choice("trust", trust, TRUSTS)
        self.max_epsilon = check_positive("max_epsilon", max_epsilon)
        one = self.max_epsilon if max_message_epsilon is None else max_message_epsilon
        self.max_message_epsilon = check_positive("max_message_epsilon", one)
        if (trust == "shuffle") != (shuffler_key is not None) or len(shuffler_key or bytes(32)) != 32:
            raise ValueError(
                f"trust={trust!r}: give shuffler_key, 32 bytes, with 'shuffle' and with nothing else"
            )
        self.shuffler_key = shuffler_key
        self.num_classes = check_int("num_classes", num_classes, 2)
        self.extractor = extractor_digest(extractor)
        #: What the separation of records rests on, in words; empty unless the extractor can't be traced.
        self.conditions: tuple[str, ...] = ()
        self._features = images
        if not isinstance(extractor, str):
            alone, self.conditions = kept_apart(extractor, made_up(images.shape[1:]))
            with torch.no_grad():
                self._features = alone(images).cpu()
        check_table(self._features, labels, self.num_classes)
        self._labels = labels
        self.unit = "record" if private_groups is None else "person"
        self._owners = None if private_groups is None else check_owners(private_groups, len(labels))
        owners = () if self._owners is None else (self._owners,)
        self.answered = AnsweredRounds(record, (self._features, labels, *owners))
        self.noise_source = noise_source if noise_source is not None else default_noise()

    def answer(self, request: Request) -> bytes:
        """Messages of this node's records, one row each, under ``"shuffle"`` in an envelope; once per round.

        Raises:
            Refused: see the class.
        """
        self._check(request)
        protocol = request.message()
        coins = self.noise_source.stream("records", request.round)
        voter = ReverseKNN(k=request.k, noise_source=coins)  # looks for queries; no noise is drawn
        voter.fit(PrivateRecords.of(self._features, self._labels, self.num_classes, owners=self._owners))
        nearest, labels = voter.votes(request.features())
        self.answered.spend(request.round, request.epsilon, self.max_epsilon)
        noise = self.noise_source.stream("client", request.round)
        sent = encode(protocol.randomize(nearest, labels, noise), protocol.bounds)
        return sent if self.shuffler_key is None else seal(sent, self.shuffler_key, request.digest)

    def _check(self, request: Request) -> None:
        stated = {
            "trust": (request.trust, self.trust),
            "unit": (request.unit, self.unit),
            "num_classes": (request.num_classes, self.num_classes),
            "dimensions": (request.dimensions, self._features.shape[1]),
            "extractor": (request.extractor, self.extractor),
        }
        for name, (asked, own) in stated.items():
            if asked != own:
                raise Refused(f"{name}={asked!r}, but this node has {own!r}; both sides must agree on it")
        if request.epsilon > self.max_message_epsilon:
            raise Refused(
                f"epsilon={request.epsilon:g} is above this node's max_message_epsilon={self.max_message_epsilon:g}"
            )
        if not (self.noise_source.cryptographic or request.seeded):
            raise Refused(
                "this node's noise comes from a seed; a ledger that says so must ask for it (seeded)"
            )
