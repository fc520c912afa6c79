"""What a node replies to each kind of message; nothing else leaves it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pl_privknn.federated.client import Client
from pl_privknn.federated.messages import VERSION, Fields, Refused, Request
from pl_privknn.federated.shuffler import Shuffler

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
