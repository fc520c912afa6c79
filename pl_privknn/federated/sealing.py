"""Messages that only the shuffler can open, though the server carries them."""

from __future__ import annotations

from typing import Any

_HEAD, _INFO, _NONCE = 32, b"pl_privknn.federated shuffle 1", bytes(12)


def new_key() -> tuple[bytes, bytes]:
    """A shuffler's private and public key, 32 bytes each (X25519), from the operating system's randomness."""
    private = _primitives()[0].X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def seal(message: bytes, public_key: bytes, about: bytes) -> bytes:
    """An envelope: a fresh public key, 32 bytes, then the message under ChaCha20-Poly1305, 16 bytes longer.

    Args:
        message: what the holder of the private key is to read.
        public_key: the shuffler's.
        about: what the envelope is for; it opens for nothing else.
    """
    x25519 = _primitives()[0]
    fresh = x25519.X25519PrivateKey.generate()
    head: bytes = fresh.public_key().public_bytes_raw()
    shared = fresh.exchange(x25519.X25519PublicKey.from_public_bytes(public_key))
    return head + _cipher(shared, head, public_key).encrypt(_NONCE, message, about)


def open_sealed(envelope: bytes, private_key: bytes, about: bytes) -> bytes:
    """Read what :func:`seal` wrote.

    Raises:
        ValueError: for an envelope of another key or purpose, or one that was changed.
    """
    x25519, invalid = _primitives()[0], _primitives()[1]
    try:
        head = envelope[:_HEAD]
        private = x25519.X25519PrivateKey.from_private_bytes(private_key)
        shared = private.exchange(x25519.X25519PublicKey.from_public_bytes(head))
        own = private.public_key().public_bytes_raw()
        opened: bytes = _cipher(shared, head, own).decrypt(_NONCE, envelope[_HEAD:], about)
    except (ValueError, invalid):
        raise ValueError("an envelope does not open: another key, another round, or changed") from None
    return opened


def _cipher(shared: bytes, head: bytes, public_key: bytes) -> Any:
    """Under a key that serves one envelope, so that its nonce may be constant."""
    _, _, hashes, hkdf, chacha = _primitives()
    key = hkdf(algorithm=hashes.SHA256(), length=32, salt=head + public_key, info=_INFO).derive(shared)
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
