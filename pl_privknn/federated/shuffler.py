"""Shuffler: opens the clients' envelopes and forwards their messages in random order."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from pl_privknn.federated.client import AnsweredRounds
from pl_privknn.federated.messages import Refused, Request, decode, encode, open_sealed
from pl_privknn.labelers.reverse_knn_local import Shuffled
from pl_privknn.privacy.noise import NoiseSource, default_noise

_LOG = logging.getLogger(__name__)


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
        """All messages of a round, mixed.

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
