"""Nodes of federated reverse kNN: clients, which answer requests from their records, and the shuffler."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_int, check_positive
from pl_privknn.features.base import Extractor
from pl_privknn.features.private_records import PrivateRecords, check_table
from pl_privknn.federated.messages import (
    TRUSTS,
    Refused,
    Request,
    decode,
    encode,
    extractor_digest,
    open_sealed,
    seal_envelope,
)
from pl_privknn.labelers.local import Shuffled
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.privacy.private_state import PrivateStore, same_table
from pl_privknn.privacy.records import check_owners

_LOG = logging.getLogger(__name__)
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
            :class:`~pl_privknn.privacy.private_state.PrivateStore`. Deleting it, or restoring an older copy,
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
            :class:`~pl_privknn.federated.nodes.AnsweredRounds`.
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
            records = PrivateRecords.of(images.flatten(1), labels, self.num_classes, examples=images)
            self._features, self.conditions = records.map(extractor)
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
        return sent if self.shuffler_key is None else seal_envelope(sent, self.shuffler_key, request.digest)

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


class Shuffler:
    """Shuffling node, which clients trust and the server does not control; it holds no records.

    The server sees who sent an envelope, not what is in it; and afterwards messages, not whose they are. A round is
    mixed once: from two mixtures that differ in one envelope the server could infer that one's message. A round with
    fewer messages than the request states is not forwarded. It can't distinguish a client's envelope from one
    that the server made up: a server that fills a crowd with its own leaves clients with the ε₀ of their own coins.

    Args:
        key: its private key, 32 bytes; see :func:`~pl_privknn.federated.messages.new_key`.
        record: a file that lasts, with the rounds that it mixed.
        noise_source: decides the order; the operating system's generator unless given.

    Example:
        >>> import tempfile
        >>> from pl_privknn.federated import Shuffler
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(Shuffler(bytes(32), f"{folder}/mixed").role)
        ...
        shuffler
    """

    role = "shuffler"

    def __init__(self, key: bytes, record: str | Path, noise_source: NoiseSource | None = None) -> None:
        if len(key) != 32:
            raise ValueError(f"key: {len(key)} bytes; expected the 32 of a private key (new_key)")
        self._key = key
        self.mixed = AnsweredRounds(record)
        self.noise_source = noise_source if noise_source is not None else default_noise()

    def mix(self, request: Request, envelopes: Sequence[bytes], most: int) -> bytes:
        """Open the envelopes of a round and return their messages in random order.

        Args:
            request: as the clients saw it; an envelope that was sealed for another one does not open.
            envelopes: as the server passed them on.
            most: messages that one envelope may hold.

        Raises:
            Refused: for a round that was mixed, or with too few messages.
        """
        if request.trust != "shuffle":
            raise Refused(f"trust={request.trust!r}: this node mixes under 'shuffle' only")
        protocol = request.message()
        opened = []
        for envelope in dict.fromkeys(envelopes):  # one that comes twice counts once
            try:
                opened.append(decode(open_sealed(envelope, self._key, request.digest), protocol.bounds, most))
            except ValueError as error:
                _LOG.warning("round %s: left out one envelope: %s", request.round, error)
        messages = torch.cat(opened) if opened else torch.empty(0, len(protocol.bounds), dtype=torch.int64)
        if len(messages) < request.min_records:
            raise Refused(
                f"{len(messages)} messages are fewer than min_records={request.min_records}; none is handed on"
            )
        self.mixed.spend(request.round, 0.0, math.inf)
        return encode(
            Shuffled.shuffle(messages, self.noise_source.stream("shuffler", request.round)), protocol.bounds
        )
