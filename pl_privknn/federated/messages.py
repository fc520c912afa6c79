"""Messages of the server and its nodes: flat dictionaries of plain values, and sealed envelopes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.recfunctions import unstructured_to_structured
from torch import Tensor, nn

from pl_privknn._checks import check_choice, check_int, check_positive, shown
from pl_privknn.config import as_section
from pl_privknn.features.base import Extractor
from pl_privknn.labelers.local import RANDOMIZERS, LocalRandomizer, make_randomizer
from pl_privknn.labelers.reverse_knn import CountTable
from pl_privknn.privacy.mechanisms.base import check_unit

#: Of these messages; a node answers no other one.
VERSION = 1
#: Trust models of clients: no trusted node, or a trusted shuffler.
TRUSTS = ("local", "shuffle")
#: Of a table: a request that names a few numbers must not fill a node's memory.
_MOST_CELLS = 1 << 24
#: One message: names to numbers, texts and bytes.
Fields = dict[str, Any]


class Refused(ValueError):
    """Raised where a node refuses to answer. The reason depends on public values alone.

    Example:
        >>> from pl_privknn.federated import Refused, Request
        >>> try:
        ...     Request.from_fields({"version": 2})
        ... except Refused as refused:
        ...     print(refused)
        ...
        version=2: this node speaks version 1
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Request of a server to each client and the shuffler: one round's queries.

    Attributes:
        round: its name, which a node answers once.
        trust: ``"local"`` or ``"shuffle"``.
        randomizer: of a message.
        epsilon: ε of one record's message, without shuffling.
        k: queries that a record votes for.
        num_classes: c.
        dimensions: d.
        extractor: digest of what made the features; see :func:`extractor_digest`.
        min_records: messages that a shuffler must have before it hands any on.
        seeded: whether noise may come from a seed, which leaves no guarantee.
        unit: unit of privacy, ``"record"``, or ``"person"`` with all records that a node has of them.
        queries: float32, little endian, s·d values.

    Example:
        >>> import torch
        >>> from pl_privknn.federated import Request
        >>> asked = Request.about(torch.zeros(5, 2), round="first", epsilon=0.5, num_classes=10, extractor="00")
        >>> asked.table, Request.from_fields(asked.fields()) == asked
        (CountTable(queries=5, classes=10, k=1, labels=1), True)
    """

    round: str
    trust: str = "local"
    randomizer: str = "collision"
    epsilon: float
    k: int = 1
    num_classes: int
    dimensions: int
    extractor: str
    min_records: int = 0
    seeded: bool = False
    unit: str = "record"
    queries: bytes

    @classmethod
    def about(cls, queries: Tensor, **stated: Any) -> Request:
        """Request about public features, float32 ``(s, d)``; for the other fields see the class."""
        values = queries.detach().cpu().numpy().astype("<f4").tobytes()
        return cls(dimensions=int(queries.shape[1]), queries=values, **stated)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Request:
        """Read a request.

        Raises:
            Refused: for one that is not whole, of another version, or out of range.
        """
        if fields.get("version") != VERSION:
            raise Refused(f"version={shown(fields.get('version'))}: this node speaks version {VERSION}")
        kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(cls)}
        if fields.keys() != {"version", *kinds}:
            raise Refused(f"request: expected the fields {', '.join(('version', *kinds))} and no others")
        for name, kind in kinds.items():
            if type(fields[name]) is not kind:
                raise Refused(f"{name}={shown(fields[name])} must be of type {kind.__name__}")
        request = cls(**{name: fields[name] for name in kinds})
        try:
            check_choice("trust", request.trust, TRUSTS)
            check_choice("randomizer", request.randomizer, tuple(RANDOMIZERS))
            check_unit(request.unit)
            check_positive("epsilon", request.epsilon)
            check_int("num_classes", request.num_classes, 2, _MOST_CELLS)
            check_int("dimensions", request.dimensions)
            check_int("min_records", request.min_records, 2 if request.trust == "shuffle" else 0)
            check_int("k", request.k, maximum=len(request.features()))
            check_int("cells of the table", request.table.cells, maximum=_MOST_CELLS)
        except ValueError as error:
            raise Refused(str(error)) from None
        if not request.round:
            raise Refused("round='' must be the round's name")
        return request

    def fields(self) -> Fields:
        """Fields as they are sent."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def features(self) -> Tensor:
        """The queries, float32 ``(s, d)``.

        Raises:
            ValueError: unless there are whole, finite rows.
        """
        row = 4 * self.dimensions
        if not self.queries or len(self.queries) % row:
            raise ValueError(f"queries: {len(self.queries)} bytes are no whole rows of {row}")
        found = torch.from_numpy(np.frombuffer(self.queries, "<f4").astype(np.float32))
        if not bool(torch.isfinite(found).all()):
            raise ValueError("queries: some are NaN or infinite")
        return found.view(-1, self.dimensions)

    @property
    def table(self) -> CountTable:
        """Shape of an answer."""
        return CountTable(len(self.queries) // (4 * self.dimensions), self.num_classes, self.k)

    def message(self) -> LocalRandomizer:
        """Randomizer of one record's message.

        Raises:
            Refused: where there is none of this ε.
        """
        try:
            return make_randomizer(self.randomizer, self.epsilon, self.table)
        except ValueError as error:
            raise Refused(str(error)) from None

    @property
    def digest(self) -> bytes:
        """SHA-256 of all fields, which an answer repeats."""
        plain = {
            name: value.hex() if isinstance(value, bytes) else value for name, value in self.fields().items()
        }
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).digest()


_KINDS = {"str": str, "int": int, "float": float, "bool": bool, "bytes": bytes}


def extractor_digest(extractor: Extractor | str) -> str:
    """Digest of a public extractor: its arguments and learned state, or a name agreed upon.

    Raises:
        ValueError: for an extractor whose arguments can't be distinguished.
    """
    if isinstance(extractor, str):
        return hashlib.sha256(f"name {extractor}".encode()).hexdigest()
    if not isinstance(extractor, Extractor):
        raise ValueError(
            f"extractor={type(extractor).__name__} is no Extractor, and both sides could not compare theirs; derive "
            "from pl_privknn.features.Extractor, or give the name of the features that images hold already"
        )
    section, left_out = as_section(extractor)
    if left_out:
        raise ValueError(
            f"extractor={type(extractor).__name__}: {left_out[0]} is not a plain value and can't be compared; "
            "give a name that identifies it"
        )
    digest = hashlib.sha256(json.dumps(section, sort_keys=True).encode())
    state = extractor.state_dict()
    if isinstance(extractor, nn.Module):  # what it was built with, pretrained weights for instance
        state = {**nn.Module.state_dict(extractor), **state}
    for name, value in sorted(state.items()):
        digest.update(f"|{name} {tuple(value.shape)} {value.dtype}|".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def encode(messages: Tensor, bounds: tuple[int, ...]) -> bytes:
    """Messages, int64 ``(n, w)``, row by row; each number in 1, 2, 4 or 8 bytes, as many as its bound needs."""
    return unstructured_to_structured(messages.numpy(), _layout(bounds), casting="unsafe").tobytes()


def decode(data: bytes, bounds: tuple[int, ...], most: int) -> Tensor:
    """Read :func:`encode`.

    Args:
        data: from somebody who may send anything.
        bounds: what each number of a message is below.
        most: more messages than this are refused.

    Raises:
        ValueError: for what is no message of this kind.
    """
    layout = _layout(bounds)
    if len(data) % layout.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole messages of {layout.itemsize}")
    if len(data) > most * layout.itemsize:
        raise ValueError(f"{len(data) // layout.itemsize} messages are more than {most}")
    rows = np.frombuffer(data, layout)
    numbers = np.concatenate([rows[name].astype(np.uint64) for name in layout.names or ()], axis=1)
    if bool((numbers >= np.array(bounds, np.uint64)).any()):
        raise ValueError("a number is not below its bound")
    return torch.from_numpy(numbers.astype(np.int64))


def _layout(bounds: tuple[int, ...]) -> np.dtype[np.void]:
    """A message, packed: a field for each run of neighbouring numbers that take as many bytes."""
    sizes = [next(size for size in (1, 2, 4, 8) if bound <= 1 << (8 * size)) for bound in bounds]
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    return np.dtype([(f"run {place}", f"<u{size}", (count,)) for place, (size, count) in enumerate(runs)])


_HEADER, _INFO, _NONCE = 32, b"pl_privknn.federated shuffle 1", bytes(12)


def new_key() -> tuple[bytes, bytes]:
    """A shuffler's private and public key, 32 bytes each (X25519), from the operating system's randomness."""
    private = _primitives()[0].X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def seal_envelope(message: bytes, public_key: bytes, about: bytes) -> bytes:
    """Seal a message: a fresh public key, 32 bytes, then the message under ChaCha20-Poly1305, 16 bytes longer.

    Args:
        message: what the holder of the private key is to read.
        public_key: the shuffler's.
        about: what the envelope is for; it opens for nothing else.
    """
    x25519 = _primitives()[0]
    fresh = x25519.X25519PrivateKey.generate()
    header: bytes = fresh.public_key().public_bytes_raw()
    shared = fresh.exchange(x25519.X25519PublicKey.from_public_bytes(public_key))
    return header + _cipher(shared, header, public_key).encrypt(_NONCE, message, about)


def open_sealed(envelope: bytes, private_key: bytes, about: bytes) -> bytes:
    """Open an envelope of :func:`seal_envelope`.

    Raises:
        ValueError: for an envelope of another key or purpose, or one that was changed.
    """
    x25519, invalid = _primitives()[0], _primitives()[1]
    try:
        header = envelope[:_HEADER]
        private = x25519.X25519PrivateKey.from_private_bytes(private_key)
        shared = private.exchange(x25519.X25519PublicKey.from_public_bytes(header))
        own = private.public_key().public_bytes_raw()
        opened: bytes = _cipher(shared, header, own).decrypt(_NONCE, envelope[_HEADER:], about)
    except (ValueError, invalid):
        raise ValueError("an envelope does not open: another key, another round, or changed") from None
    return opened


def _cipher(shared: bytes, header: bytes, public_key: bytes) -> Any:
    """Cipher under a key that is used for one envelope, so that its nonce may be constant."""
    _, _, hashes, hkdf, chacha = _primitives()
    key = hkdf(algorithm=hashes.SHA256(), length=32, salt=header + public_key, info=_INFO).derive(shared)
    return chacha(key)


def _primitives() -> Any:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise ImportError(
            "trust='shuffle' over clients needs cryptography: pip install 'pl-privknn[federated]'"
        ) from None
    return x25519, InvalidTag, hashes, HKDF, ChaCha20Poly1305
