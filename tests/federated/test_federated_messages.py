"""What is on the wire: its bytes, written out by hand, and what of it is refused."""

import struct

import pytest
import torch

from pl_privknn.features import HOG, PublicPCA
from pl_privknn.federated import Refused, Request
from pl_privknn.federated.messages import decode, encode, extractor_digest
from pl_privknn.labelers.reverse_knn import CountTable

ASKED = Request.about(
    torch.eye(4), round="first", epsilon=0.5, num_classes=3, extractor="ab", k=2, min_records=2
)


def test_a_message_is_its_numbers_in_little_endian():
    key, value = 0x0123456789ABCDEF, 5
    sent = encode(torch.tensor([[key, value], [1, 300]]), (1 << 62, 400))
    assert sent == struct.pack("<QHQH", key, value, 1, 300)
    assert encode(torch.tensor([[1, 0, 1]]), (2, 2, 2)) == b"\x01\x00\x01"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (bytes(8), "8 bytes are no whole messages of 9"),
        (bytes(9 * 3), "3 messages are more than 2"),
        (struct.pack("<QB", 1 << 62, 0), "not below its bound"),
        (struct.pack("<QB", (1 << 64) - 1, 0), "not below its bound"),
        (struct.pack("<QB", 0, 7), "not below its bound"),
    ],
)
def test_what_is_no_message_is_refused(data, named):
    with pytest.raises(ValueError, match=named):
        decode(data, (1 << 62, 7), 2)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("version", [2]),
        ("trust", ["open"]),
        ("randomizer", ["shares", "none"]),
        ("epsilon", [0.0, float("nan"), float("inf"), -1.0, 1, "1"]),
        ("k", [0, 5, True]),
        ("num_classes", [1, 1 << 40]),
        ("dimensions", [0, 3]),
        ("round", [""]),
        ("queries", [b"", struct.pack("<4f", 0, 0, 0, float("inf")), "0000"]),
        ("seeded", [0]),
        ("unit", ["family"]),
        ("further", [1]),
    ],
)
def test_a_request_that_is_not_whole_or_out_of_range_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(Refused, match=rf"request|{name}|queries"):
            Request.from_fields({**ASKED.fields(), name: value})


def test_a_crowd_of_one_and_a_field_less_are_refused():
    with pytest.raises(Refused, match="min_records"):
        Request.from_fields({**ASKED.fields(), "trust": "shuffle", "min_records": 1})
    with pytest.raises(Refused, match="request: expected the fields"):
        Request.from_fields({name: value for name, value in ASKED.fields().items() if name != "k"})


def test_the_digest_is_about_every_field():
    others = {
        "round": "second",
        "trust": "shuffle",
        "randomizer": "randomized_response",
        "epsilon": 0.25,
        "k": 1,
        "num_classes": 4,
        "dimensions": 2,
        "extractor": "ac",
        "min_records": 3,
        "seeded": True,
        "unit": "person",
        "queries": torch.zeros(4, 4).numpy().tobytes(),
    }
    changed = [Request.from_fields({**ASKED.fields(), name: value}).digest for name, value in others.items()]
    assert Request.from_fields(ASKED.fields()) == ASKED
    assert torch.equal(ASKED.features(), torch.eye(4))
    assert ASKED.table == CountTable(4, 3, 2)
    assert len({ASKED.digest, *changed}) == 1 + len(others) == len(ASKED.fields())


def test_extractors_are_told_apart_by_their_arguments_and_by_what_they_learned():
    images = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    learned = [PublicPCA(HOG(pixels_per_cell=2), 3) for _ in range(3)]
    for extractor, part in zip(learned, (images, images, images[:20]), strict=True):
        extractor.fit_public(part)
    first, again, other = map(extractor_digest, learned)
    assert first == again
    assert len({first, other, *map(extractor_digest, (HOG(), HOG(pixels_per_cell=2), "HOG"))}) == 5
