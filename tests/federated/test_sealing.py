"""Envelopes: only the shuffler opens them, and only for what they were sealed for."""

import pytest

pytest.importorskip("cryptography")

from pl_privknn.federated import new_key
from pl_privknn.federated.messages import open_sealed, seal_envelope


def test_the_holder_of_the_key_reads_what_was_sealed_in_48_bytes_more():
    private, public = new_key()
    envelope = seal_envelope(b"message", public, b"round")
    assert open_sealed(envelope, private, b"round") == b"message"
    assert len(envelope) == 48 + len(b"message")
    assert b"message" not in envelope


def test_equal_messages_look_different():
    _, public = new_key()
    first, second = (seal_envelope(bytes(1000), public, b"") for _ in range(2))
    assert first[:32] != second[:32]
    assert first[32:] != second[32:]


def test_another_key_purpose_or_content_does_not_open():
    private, public = new_key()
    envelope = seal_envelope(b"message", public, b"round")
    changed = [
        envelope[:place] + bytes([envelope[place] ^ 1]) + envelope[place + 1 :] for place in (0, 31, 32)
    ]
    changed.append(envelope[:-1] + bytes([envelope[-1] ^ 1]))
    for wrong in (*changed, b"", envelope[:40], bytes(60)):
        with pytest.raises(ValueError, match="does not open"):
            open_sealed(wrong, private, b"round")
    with pytest.raises(ValueError, match="does not open"):
        open_sealed(envelope, new_key()[0], b"round")
    with pytest.raises(ValueError, match="does not open"):
        open_sealed(envelope, private, b"other")
