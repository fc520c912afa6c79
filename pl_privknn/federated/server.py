"""Server of federated reverse kNN: charges a round, sends requests, checks replies and decides."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.features.base import Extractor
from pl_privknn.federated.messages import VERSION, Fields, Request, decode, extractor_digest
from pl_privknn.labelers.base import Release, stated_plan
from pl_privknn.labelers.local import ClientReverseKNN, LocalRandomizer, SingleMessage
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.files import replaced_durably
from pl_privknn.privacy.ledger import Ledger

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class Transport(Protocol):
    """Protocol of a message transport, such as Flower's grid."""

    def nodes(self, least: int) -> list[int]:
        """Wait for ``least`` nodes; returns all that are connected."""

    def ask(self, action: str, requests: Mapping[int, Fields]) -> Iterable[tuple[int, Any]]:
        """Send each node its message; returns replies with their nodes, in any order."""


@dataclasses.dataclass(frozen=True)
class FederatedRound:
    """One round of reverse kNN over clients: request, ledger and labels.

    Attributes:
        name: of the round, and of its run in the ledger; a round is asked once.
        labeler: with its trust, ε, randomiser and k; its private table stays empty.
        queries: features of public examples, float32 ``(s, d)``, made by ``extractor``.
        num_classes: c.
        extractor: the public extractor that was agreed upon, or a name for it.
        ledger: the server's file of all releases about these clients' records.
        release: the ``.npz`` file that is written: ``labels``, ``soft``, ``scores``, ``score_deviation``.
        budget: of the ledger, and of a labeler without a budget of its own; senders are visible, so the adjacency is
            ``"replace_one"``. With ``unit="person"`` nodes that hold persons send one message for each.
        num_nodes: nodes that must be there before anyone is asked, the shuffler among them.
        max_messages: records (or persons) of one node; more are refused.

    Example:
        >>> import torch
        >>> from pl_privknn.federated import FederatedRound
        >>> from pl_privknn.labelers import LocalReverseKNN
        >>> from pl_privknn.privacy import Budget, account
        >>> round_one = FederatedRound(
        ...     "first", LocalReverseKNN(), torch.eye(3), 10, extractor="unit vectors", ledger="l.sqlite",
        ...     release="first.npz", budget=Budget(epsilon=0.5, adjacency="replace_one"),
        ... )
        >>> round(account(round_one.plan(), delta=1e-5, adjacency="replace_one").epsilon, 3)
        0.5
    """

    name: str
    labeler: ClientReverseKNN
    queries: Tensor
    num_classes: int
    extractor: Extractor | str
    ledger: str | Path
    release: str | Path
    budget: Budget = Budget(adjacency="replace_one")
    num_nodes: int = 1
    max_messages: int = 1_000_000

    def __post_init__(self) -> None:
        if self.budget.adjacency != "replace_one":
            raise ValueError(
                f"budget.adjacency={self.budget.adjacency!r}: senders are visible; use adjacency='replace_one'"
            )
        check_int("num_nodes", self.num_nodes)
        check_int("max_messages", self.max_messages)
        check_int("num_classes", self.num_classes, 2)
        if (
            self.queries.ndim != 2
            or self.queries.dtype != torch.float32
            or len(self.queries) < self.labeler.k
        ):
            raise ValueError(
                f"queries: shape {tuple(self.queries.shape)}, {self.queries.dtype}; expected float32 (s, d), s at "
                f"least k={self.labeler.k}"
            )
        if not isinstance(self.labeler, ClientReverseKNN):
            raise ValueError(
                f"labeler={type(self.labeler).__name__}: clients' exact counts would have to reach a server, and no "
                "secure aggregation is offered here; use LocalReverseKNN or ShuffledReverseKNN"
            )
        self.labeler.take_budget(self.budget)
        if self.labeler.randomizer == "shares":
            raise ValueError(
                "randomizer='shares': an envelope's length would reveal how much noise its client drew; use one "
                "message, such as randomizer='collision'"
            )

    def plan(self) -> list[Any]:
        """Cost of the round, as one process would state it."""
        size = len(self.queries)
        return stated_plan(self.labeler, size, size, self.num_classes)

    def request(self, origin: str) -> Request:
        """Request to every client; ``origin`` identifies the ledger, since rounds of others may share the name."""
        labeler = self.labeler
        return Request.about(
            self.queries,
            round=f"{self.name}@{origin[:16]}",
            trust=labeler.trust,
            randomizer=labeler.randomizer,
            epsilon=self.message().epsilon,
            k=labeler.k,
            num_classes=self.num_classes,
            extractor=extractor_digest(self.extractor),
            min_records=getattr(self._protocol(), "num_clients", 0),
            seeded=not labeler.noise_source.cryptographic,
            unit=self.budget.unit,
        )

    def message(self) -> LocalRandomizer:
        """Randomizer of one record's message."""
        protocol = self._protocol()
        randomizer: LocalRandomizer = protocol.randomizer if isinstance(protocol, SingleMessage) else protocol
        return randomizer

    def _protocol(self) -> Any:
        return self.labeler.protocol(len(self.queries), self.num_classes)


def run_round(config: FederatedRound, transport: Transport) -> Release:
    """Charge a round, ask the clients and write the labels.

    A node that drops out, refuses, or sends what is no answer is left out and named in the log: fewer answers make
    the labels less accurate and change nothing in ε.

    Raises:
        ValueError: before anything is paid, for a round that was asked, or nodes that can't answer it; afterwards,
            under ``"shuffle"``, where fewer records took part than the guarantee counts on.
        BudgetExceeded: if the ledger's budget would be passed; no client was asked.
        RuntimeError: where no client answered.
    """
    labeler, target = config.labeler, Path(config.release)
    if target.exists():
        raise ValueError(
            f"release={str(target)!r} already exists, and each round is queried once; give another name to a new one"
        )
    ledger = Ledger(config.ledger, config.budget)
    with contextlib.closing(ledger):
        run = ledger.run(config.name, plan=config.plan())
        if run.num_charges:
            raise ValueError(
                f"name={config.name!r} was paid for in {ledger.path}, and nodes answer a round once; give another"
            )
        request = config.request(run.origin)
        clients, shuffler = _roles(config, transport)
        release = labeler.release_messages(
            lambda: _messages(config, transport, request, clients, shuffler),
            len(config.queries),
            config.num_classes,
            labeler.paying(run, config.budget.unit),
        )
    kept = {name: value for name, value in vars(release).items() if value is not None}
    with replaced_durably(target) as file:
        np.savez(file, allow_pickle=False, **{name: np.asarray(value) for name, value in kept.items()})
    return release


def _roles(config: FederatedRound, transport: Transport) -> tuple[list[int], int | None]:
    """Nodes with records, and the shuffler."""
    nodes = transport.nodes(config.num_nodes)
    said = _accepted(transport.ask("role", {node: {"version": VERSION} for node in nodes}), nodes, _role)
    clients = sorted(node for node, role in said.items() if role == "client")
    shufflers = sorted(node for node, role in said.items() if role == "shuffler")
    wanted = 1 if config.labeler.trust == "shuffle" else 0
    if len(shufflers) != wanted or not clients:
        raise ValueError(
            f"trust={config.labeler.trust!r} needs clients and {wanted} shuffling nodes; of the nodes that are there "
            f"{len(clients)} are clients and {len(shufflers)} shufflers. Nothing was charged"
        )
    return clients, shufflers[0] if shufflers else None


def _messages(
    config: FederatedRound, transport: Transport, request: Request, clients: list[int], shuffler: int | None
) -> Tensor:
    """Every record's message, int64 ``(n, w)``; through the shuffler, where there is one."""
    bounds = config.message().bounds
    asked = dict.fromkeys(clients, request.fields())

    def payload(fields: Any) -> bytes:
        if fields.get("request") != request.digest or not isinstance(fields.get("payload"), bytes):
            raise ValueError("no answer to this request")
        return bytes(fields["payload"])

    def messages(most: int) -> Callable[[Any], Tensor]:
        return lambda fields: decode(payload(fields), bounds, most)

    most = config.max_messages
    if shuffler is None:
        found = _accepted(transport.ask("answer", asked), clients, messages(most))
    else:
        sealed = _accepted(transport.ask("answer", asked), clients, payload)
        order = {**request.fields(), "envelopes": list(sealed.values()), "most": most}
        mixed = transport.ask("mix", {shuffler: order})
        found = _accepted(mixed, [shuffler], messages(most * len(clients)))
    parts = list(found.values())
    if not sum(map(len, parts)):
        raise RuntimeError(
            f"round {request.round!r} was charged and no node answered; see the log. Ask again under another "
            "name"
        )
    return torch.cat(parts)


def _role(fields: Any) -> str:
    if fields.get("version") != VERSION or fields.get("role") not in ("client", "shuffler"):
        raise ValueError("it does not say what it is, in this version")
    return str(fields["role"])


def _accepted(
    replies: Iterable[tuple[int, Any]], asked: list[int], read: Callable[[Any], _T]
) -> dict[int, _T]:
    """First valid reply of each node; invalid ones are named in the log."""
    found: dict[int, _T] = {}
    seen: set[int] = set()
    for node, fields in replies:
        try:
            if node not in asked:
                raise ValueError("it was not asked")
            if node in seen:
                raise ValueError("a second reply")
            seen.add(node)
            if not isinstance(fields, Mapping):
                raise ValueError("no message")
            if "refused" in fields:
                raise ValueError(" ".join(str(fields["refused"]).split())[:300])
            found[node] = read(fields)
        except ValueError as error:
            _LOG.warning("node %d is left out: %s", node, error)
    for node in sorted(set(asked) - seen):
        _LOG.warning("node %d is left out: no reply", node)
    return found
