"""Flower apps for ``flwr run`` that carry the messages of federated reverse kNN."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pl_privknn.federated.messages import VERSION, Fields, Refused, Request
from pl_privknn.federated.nodes import Client, Shuffler
from pl_privknn.federated.server import FederatedRound, run_round

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp


_LOG = logging.getLogger(__name__)
Node = Client | Shuffler


def reply_to(action: str, node: Callable[[], Node], fields: Mapping[str, Any] | None) -> Fields:
    """A node's reply: fields, or ``refused`` with a reason.

    Of an error that was not foreseen nothing leaves the node: its text may hold what is private.

    Args:
        action: one of :data:`ACTIONS`.
        node: makes the node.
        fields: as they came.
    """
    try:
        return ACTIONS[action](node(), dict(fields or {}))
    except Refused as refused:
        return {"refused": str(refused)}
    except Exception:
        _LOG.exception("this node did not answer")
        return {"refused": "an error on the node; its own log has it"}


def _role(node: Node, fields: Fields) -> Fields:
    return {"version": VERSION, "role": node.role}


def _answer(node: Node, fields: Fields) -> Fields:
    if not isinstance(node, Client):
        raise Refused("this node has no records")
    request = Request.from_fields(fields)
    return {"request": request.digest, "payload": node.answer(request)}


def _mix(node: Node, fields: Fields) -> Fields:
    if not isinstance(node, Shuffler):
        raise Refused("this node does not mix")
    envelopes, most = fields.pop("envelopes", []), fields.pop("most", 0)
    request = Request.from_fields(fields)
    return {"request": request.digest, "payload": node.mix(request, envelopes, most)}


ACTIONS: dict[str, Callable[[Node, Fields], Fields]] = {"role": _role, "answer": _answer, "mix": _mix}


_RECORD = "pl_privknn"
_PAUSE = 1.0


def client_app(node: Callable[[Context], Client | Shuffler]) -> ClientApp:
    """Flower app for all nodes of a run: clients and the shuffler.

    Args:
        node: called for each message with Flower's context, whose ``node_config`` says which node it is; returns
            what this node is. Under simulation ``context.node_config["partition-id"]`` identifies nodes.

    Raises:
        ImportError: without Flower.
    """
    flwr = _flower()
    app = flwr.clientapp.ClientApp()

    def registered(action: str) -> None:
        @app.query(action)
        def reply(message: Message, context: Context) -> Message:
            sent = message.content.config_records.get(_RECORD)
            made = reply_to(action, lambda: node(context), sent)
            return flwr.app.Message(
                flwr.app.RecordDict({_RECORD: flwr.app.ConfigRecord(made)}), reply_to=message
            )

    for action in ACTIONS:
        registered(action)
    return app


def server_app(
    config: FederatedRound | Callable[[Context], FederatedRound], timeout: float = 3600.0
) -> ServerApp:
    """Flower app for the server: one round, with its ledger.

    Args:
        config: the round, or what makes it of Flower's context, whose ``run_config`` ``flwr run --run-config`` sets.
        timeout: seconds after which nodes that did not reply are left out.

    Raises:
        ImportError: without Flower.
    """
    flwr = _flower()
    app = flwr.serverapp.ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        asked = config if isinstance(config, FederatedRound) else config(context)
        release = run_round(asked, GridTransport(grid, timeout))
        _LOG.info("round %s: %d labels in %s", asked.name, int(release.answered.sum()), asked.release)

    return app


class GridTransport:
    """Transport of a round over Flower's grid; see :class:`~pl_privknn.federated.server.Transport`."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout

    def nodes(self, least: int) -> list[int]:
        """Wait for ``least`` nodes; returns all that are connected."""
        end = time.monotonic() + self._timeout
        while len(found := sorted(self._grid.get_node_ids())) < least:
            if time.monotonic() > end:
                raise ValueError(
                    f"num_nodes={least}: {len(found)} came in {self._timeout:g} s. Nothing was charged"
                )
            time.sleep(_PAUSE)
        return found

    def ask(self, action: str, requests: Mapping[int, Fields]) -> Iterator[tuple[int, Any]]:
        """Send each node its message, and return the replies before the timeout."""
        flwr = _flower()
        messages = [
            flwr.app.Message(
                flwr.app.RecordDict({_RECORD: flwr.app.ConfigRecord(fields)}),
                dst_node_id=node,
                message_type=f"query.{action}",
            )
            for node, fields in requests.items()
        ]
        for reply in self._grid.send_and_receive(messages, timeout=self._timeout):
            sent = None if reply.has_error() else reply.content.config_records.get(_RECORD)
            yield reply.metadata.src_node_id, None if sent is None else dict(sent)


def _flower() -> Any:
    try:
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
    except ImportError:
        raise ImportError("clients and servers need Flower: pip install 'pl-privknn[federated]'") from None
    return flwr
