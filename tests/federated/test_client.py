"""A client's privacy is its own affair: what it refuses, what it writes down first, and what leaves it."""

import contextlib
import doctest
import importlib
import math
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from pl_privknn.federated import Client, Refused, Request
from pl_privknn.federated.apps import reply_to
from pl_privknn.federated.messages import decode, extractor_digest
from pl_privknn.federated.nodes import AnsweredRounds
from pl_privknn.labelers.local import RANDOMIZERS, make_randomizer
from pl_privknn.privacy.noise import NoiseSource, SystemNoise
from pl_privknn.privacy.private_state import PrivateStoreError
from tests.federated.federated_setup import CLASSES, NAME, client, coins, queries, records


def request(**stated):
    given = {"round": "first", "epsilon": 1.0, "num_classes": CLASSES, "extractor": extractor_digest(NAME)}
    return Request.about(queries(), **{**given, "seeded": True, **stated})


class NeverDrawn(NoiseSource):
    cryptographic = True

    def random_words(self, count):
        raise AssertionError("drawn")

    def stream(self, *key):
        return self


@pytest.mark.parametrize("name", list(RANDOMIZERS))
def test_what_leaves_is_the_randomisers_message_of_the_literal_nearest_query(tmp_path, name):
    features, labels = records(0)
    distances = (features[:, None] - queries()[None]).square().sum(dim=2)
    protocol = make_randomizer(name, 1.0, request().table)
    noise = coins(0).stream("client", "first")
    literal = protocol.randomize(distances.argmin(dim=1, keepdim=True), labels[:, None], noise)
    sent = client(tmp_path, 0).answer(request(randomizer=name))
    assert torch.equal(decode(sent, protocol.bounds, 40), literal)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"trust": "shuffle", "min_records": 2}, "trust='shuffle', but this node has 'local'"),
        ({"num_classes": CLASSES - 1}, "num_classes=2, but this node has 3"),
        ({"num_classes": CLASSES + 1}, "num_classes=4, but this node has 3"),
        ({"extractor": extractor_digest("other")}, "extractor="),
        ({"epsilon": 1.6}, "above this node's max_message_epsilon=1.5"),
        ({"epsilon": 1e-17}, "epsilon=1e-17 .* must be at least 2e-09"),
        ({"epsilon": 1e-17, "randomizer": "randomized_response"}, "epsilon=1e-17 .* must be at least 2e-09"),
    ],
)
def test_a_request_for_something_else_is_refused_before_anything_is_spent(tmp_path, stated, named):
    node = client(tmp_path, 0, seeded=False, max_message_epsilon=1.5, noise_source=NeverDrawn())
    with pytest.raises(Refused, match=named):
        node.answer(request(**stated))
    assert node.answered.spent == 0.0


def test_what_is_refused_depends_on_no_label(tmp_path):
    texts = set()
    for label in (0, 2):
        labels, record = torch.full((40,), label), tmp_path / "answered.sqlite"
        node = Client(records(0)[0], labels, CLASSES, NAME, max_epsilon=9.0, record=record)
        with pytest.raises(Refused) as caught:
            node.answer(request(num_classes=2))
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_round_is_answered_once_and_no_message_can_be_had_twice(tmp_path):
    client(tmp_path, 0).answer(request())
    for again in (request(), request(epsilon=0.5), request(randomizer="randomized_response")):
        node = client(tmp_path, 0)  # another process's object, the same file
        with pytest.raises(Refused, match="answers a round once"):
            node.answer(again)
    assert node.answered.spent == 1.0


def test_rounds_add_up_to_the_budget_and_no_further(tmp_path):
    node = client(tmp_path, 0, max_epsilon=0.3)
    for number in range(3):  # whose floats add up to more than 0.3 by rounding
        node.answer(request(round=f"r{number}", epsilon=0.1))
    for epsilon in (0.1, 1e-3):
        with pytest.raises(Refused, match=r"own budget max_epsilon=0\.3"):
            node.answer(request(round="further", epsilon=epsilon))
    assert node.answered.spent == pytest.approx(0.3)


def test_what_is_spent_is_on_disk_before_a_coin_is_tossed(tmp_path):
    node = client(tmp_path, 0, seeded=False, noise_source=NeverDrawn())
    with pytest.raises(AssertionError, match="drawn"):
        node.answer(request(epsilon=0.7))
    with contextlib.closing(sqlite3.connect(tmp_path / "answered-0.sqlite")) as record:
        assert record.execute("SELECT * FROM rounds").fetchall() == [("first", 0.7)]
    assert (tmp_path / "answered-0.sqlite").stat().st_mode & 0o077 == 0


def test_a_seeded_node_answers_a_server_whose_ledger_says_so_alone(tmp_path):
    with pytest.raises(Refused, match="seed"):
        client(tmp_path, 0).answer(request(seeded=False))
    node = client(tmp_path, 0, seeded=False)
    assert len(node.answer(request(seeded=False))) == 40 * 9
    assert isinstance(node.noise_source, SystemNoise)


def test_a_record_that_is_none_or_a_copy_is_never_taken_for_an_empty_one(tmp_path):
    record = tmp_path / "answered-0.sqlite"
    client(tmp_path, 0).answer(request())
    (tmp_path / "other").mkdir()
    shutil.copy(record, tmp_path / "other")
    with pytest.raises(PrivateStoreError, match="is a copy of"):
        client(tmp_path / "other", 0).answer(request(round="second"))
    whole = record.read_bytes()
    for content in (b"", b'{"a": 1}', whole[:-4096], bytes(4096) + whole[4096:]):
        record.write_bytes(content)
        with pytest.raises(PrivateStoreError, match="up to date"):
            client(tmp_path, 0).answer(request(round="second"))


def test_nothing_of_an_unforeseen_error_leaves_the_node():
    def broken():
        raise RuntimeError("label 7 of Ann")

    assert reply_to("answer", broken, request().fields()) == {
        "refused": "an error on the node; its own log has it"
    }
    assert "refused" in reply_to("answer", lambda: None, None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"trust": "everybody"}, "trust"),
        ({"max_epsilon": 0.0}, "max_epsilon"),
        ({"max_message_epsilon": -1.0}, "max_message_epsilon"),
        ({"trust": "shuffle"}, "shuffler_key"),
        ({"shuffler_key": bytes(32)}, "shuffler_key"),
        ({"trust": "shuffle", "shuffler_key": bytes(31)}, "shuffler_key"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, named):
    with pytest.raises(ValueError, match=named):
        client(tmp_path, 0, **arguments)


def test_other_processes_wait_from_the_reading_of_a_total_to_its_writing(tmp_path, monkeypatch):
    path, tried = tmp_path / "answered.sqlite", []

    fsum = math.fsum

    def adding(values):
        with pytest.raises(Timeout):
            FileLock(f"{path}.lock", timeout=0).acquire()
        tried.append(fsum(values))
        return tried[-1]

    monkeypatch.setattr(math, "fsum", adding)
    AnsweredRounds(path).spend("a", 1.0, budget=1.0)
    with pytest.raises(Refused, match="own budget"):
        AnsweredRounds(path).spend("b", 1.0, budget=1.0)
    assert tried == [1.0, 2.0]


def test_the_bytes_of_the_guide_are_those_that_are_sent(capsys):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "federated.md").read_text(encoding="utf-8")
    (code,) = [
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Request.about" in text
    ]
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", ["messages", "nodes", "server"])
def test_examples_of_docstrings_are_true(name):
    done = doctest.testmod(importlib.import_module(f"pl_privknn.federated.{name}"))
    assert done.attempted > 0
    assert done.failed == 0


def test_the_record_is_one_file_wherever_the_node_starts_and_of_one_table(tmp_path, monkeypatch):
    features, labels = records(0)

    def node(record, start=0):
        return Client(features[start:], labels[start:], CLASSES, NAME, max_epsilon=2.0, record=record)

    with pytest.raises(ValueError, match=r"record='answered.sqlite' is relative.*absolute path"):
        node("answered.sqlite")
    record = tmp_path / "answered.sqlite"
    node(record).answer(request())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="was answered by this node"):
        node(record).answer(request())
    with pytest.raises(Refused, match="counts what other records spent"):
        node(record, 1).answer(request(round="another"))
