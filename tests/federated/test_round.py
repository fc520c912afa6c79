"""A round over nodes: the counts and the ε of one process, paid for first, whatever nodes send."""

import logging

import numpy as np
import pytest
import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.federated import FederatedRound, Refused, run_round
from pl_privknn.federated.messages import decode
from pl_privknn.labelers import LocalReverseKNN, ReverseKNN
from pl_privknn.labelers.base import stated_plan
from pl_privknn.labelers.local import RANDOMIZERS
from pl_privknn.privacy import Budget
from pl_privknn.privacy.budget import BudgetExceeded
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.verify import audit_ledger
from tests.federated.federated_setup import CLASSES, Wire, asked, client, coins, queries, records
from tests.setup.grouped import grouped

PERSONS = Budget(2.0, adjacency="replace_one", unit="person")


def four(folder, **arguments):
    return {node: client(folder, node, **arguments) for node in range(4)}


def seeded(**arguments):
    return LocalReverseKNN(
        noise_source=SeededNoise(1),
        **grouped(LocalReverseKNN, **{"epsilon": 2.0, "adjacency": "replace_one", **arguments}),
    )


def reports(path):
    ledger = Ledger.open_readonly(path)
    try:
        return ledger.report()
    finally:
        ledger.close()


def one_process(config, wire, nodes):
    """What a process that has all these nodes' records makes of them, tossing each node's coins."""
    protocol = config.labeler.protocol(len(queries()), CLASSES)
    (name,) = {fields["round"] for fields in wire.sent if "round" in fields}
    messages = []
    for node in nodes:
        features, labels = records(node)
        nearest = (features[:, None] - queries()[None]).square().sum(dim=2).argmin(dim=1, keepdim=True)
        noise = coins(node).stream("client", name)
        messages.append(protocol.randomize(nearest, labels[:, None], noise))
    return protocol.aggregate(torch.cat(messages))


@pytest.mark.parametrize("name", list(RANDOMIZERS))
def test_counts_of_four_nodes_are_those_of_one_process(tmp_path, name):
    config, wire = asked(tmp_path, seeded(randomizer=name)), Wire(four(tmp_path))
    release = run_round(config, wire)
    one = one_process(config, wire, range(4))
    assert torch.equal(release.scores, one.float())
    assert torch.equal(release.labels, one.argmax(dim=1))
    with np.load(tmp_path / "first.npz") as stored:
        assert stored["labels"].tolist() == release.labels.tolist()
        assert np.array_equal(stored["scores"], release.scores.numpy())


def test_epsilon_is_that_of_one_process(tmp_path):
    run_round(asked(tmp_path, seeded()), Wire(four(tmp_path)))
    one = seeded()
    features, labels = zip(*map(records, range(4)), strict=True)
    one.fit(PrivateRecords.of(torch.cat(features), torch.cat(labels), CLASSES))
    ledger = Ledger(tmp_path / "one.sqlite", Budget(adjacency="replace_one"))
    one.label(queries(), ledger.run("first", plan=stated_plan(one, 4, 4, CLASSES)))
    ours, single = reports(tmp_path / "ledger.sqlite"), ledger.report()
    assert ours.charged == single.charged
    assert ours.epsilon == single.epsilon == pytest.approx(2.0, abs=1e-3)
    assert ours.guarantee.guarantee == single.guarantee.guarantee


@pytest.mark.parametrize("cryptographic", [True, False])
def test_the_ledger_says_whether_coins_came_from_a_seed(tmp_path, cryptographic):
    labeler = (
        LocalReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one")) if cryptographic else seeded()
    )
    nodes = {node: client(tmp_path, node, seeded=not cryptographic) for node in range(2)}
    run_round(asked(tmp_path, labeler), Wire(nodes))
    stated = reports(tmp_path / "ledger.sqlite").guarantee.guarantee
    assert stated == ("unconditional" if cryptographic else "none")


def test_beyond_the_budget_nobody_is_asked(tmp_path):
    wire = Wire(four(tmp_path))
    with pytest.raises(BudgetExceeded):
        run_round(asked(tmp_path, budget=Budget(epsilon=1.9, adjacency="replace_one")), wire)
    assert wire.asked == []


@pytest.mark.parametrize("randomizer", list(RANDOMIZERS))
def test_an_epsilon_too_small_to_compute_with_is_refused_before_the_round_is_noted(tmp_path, randomizer):
    wire = Wire(four(tmp_path))
    with pytest.raises(ValueError, match=r"epsilon=1e-17 .* must be at least 2e-09"):
        run_round(asked(tmp_path, seeded(epsilon=1e-17, randomizer=randomizer)), wire)
    assert wire.asked == []
    assert Ledger.open_readonly(tmp_path / "ledger.sqlite").runs == []


def test_who_drops_out_changes_the_counts_and_not_epsilon(tmp_path):
    paid = []

    def looked(action, replies):  # clients are asked after the round is paid for
        if action == "answer":
            paid.append(len(reports(tmp_path / "ledger.sqlite").charged))
        return replies

    config, wire = asked(tmp_path), Wire({**four(tmp_path), 2: None}, looked)
    release = run_round(config, wire)
    assert paid == [1]
    assert torch.equal(release.scores, one_process(config, wire, (0, 1, 3)).float())
    assert reports(tmp_path / "ledger.sqlite").epsilon == pytest.approx(2.0, abs=1e-3)


def of(node, change):
    def changed(action, replies):
        if action != "answer":
            return replies
        return [(who, change(fields) if who == node else fields) for who, fields in replies]

    return changed


ILL_MADE = {
    "cut": (lambda fields: {**fields, "payload": fields["payload"][:-1]}, "no whole messages"),
    "surplus": (lambda fields: {**fields, "payload": fields["payload"] * 2}, "more than 40"),
    "beyond": (lambda fields: {**fields, "payload": b"\xff" * 9}, "not below its bound"),
    "text": (lambda fields: {**fields, "payload": "a"}, "no answer to this request"),
    "another request": (lambda fields: {**fields, "request": bytes(32)}, "no answer to this request"),
    "nothing": (lambda fields: {}, "no answer to this request"),
    "no message": (lambda fields: None, "no message"),
    "refused": (lambda fields: {"refused": "I\nwon't"}, "I won't"),
}


@pytest.mark.parametrize("kind", list(ILL_MADE))
def test_an_ill_made_reply_is_left_out_by_name(tmp_path, caplog, kind):
    change, named = ILL_MADE[kind]
    with caplog.at_level(logging.WARNING):
        release = run_round(asked(tmp_path, max_messages=40), Wire(four(tmp_path), of(2, change)))
    assert caplog.messages == [f"node 2 is left out: {caplog.messages[0].split(': ', 1)[1]}"]
    assert named in caplog.messages[0]
    assert release.score_deviation == pytest.approx(seeded().protocol(4, CLASSES).deviation(120))


def test_a_second_reply_and_one_of_a_stranger_are_left_out_by_name(tmp_path, caplog):
    def changed(action, replies):
        return [*replies, replies[1], (99, replies[1][1])]

    with caplog.at_level(logging.WARNING):
        release = run_round(asked(tmp_path), Wire(four(tmp_path), changed))
    assert "node 1 is left out: a second reply" in caplog.messages
    assert "node 99 is left out: it was not asked" in caplog.messages
    assert release.score_deviation == pytest.approx(seeded().protocol(4, CLASSES).deviation(160))


def test_a_round_is_asked_and_paid_for_once(tmp_path):
    wire = Wire(four(tmp_path))
    run_round(asked(tmp_path), wire)
    with pytest.raises(ValueError, match="release="):
        run_round(asked(tmp_path), wire)
    (tmp_path / "first.npz").unlink()
    with pytest.raises(ValueError, match="name='first' was paid for"):
        run_round(asked(tmp_path), wire)
    assert wire.asked.count(("answer", 0)) == 1


def test_two_servers_rounds_of_one_name_are_two_rounds_to_a_client(tmp_path):
    nodes = four(tmp_path)
    for server in ("a", "b"):
        (tmp_path / server).mkdir()
        run_round(asked(tmp_path / server), Wire(nodes))
    assert nodes[0].answered.spent == 4.0


def test_without_an_answer_there_is_no_release(tmp_path):
    with pytest.raises(RuntimeError, match="no node answered"):
        run_round(asked(tmp_path), Wire(four(tmp_path, max_epsilon=0.5)))
    assert not (tmp_path / "first.npz").exists()
    assert len(reports(tmp_path / "ledger.sqlite").charged) == 1
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="0 are clients"):  # before anything is paid
        run_round(asked(tmp_path / "other"), Wire({0: None}))
    assert reports(tmp_path / "other" / "ledger.sqlite").charged == ()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"queries": torch.zeros(3)}, "queries"),
        ({"queries": torch.zeros(3, 2, dtype=torch.float64)}, "queries"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"max_messages": 0}, "max_messages"),
        ({"num_classes": 1}, "num_classes"),
        ({}, "labeler=ReverseKNN"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    given = {"queries": queries(), "num_classes": CLASSES, **arguments}
    labeler = ReverseKNN(budget=Budget(epsilon=1.0)) if named == "labeler=ReverseKNN" else seeded()
    with pytest.raises(ValueError, match=named):
        FederatedRound("a", labeler, extractor="b", ledger="c", release="d", **given)


def test_persons_send_one_message_and_the_ledger_says_so(tmp_path):
    owners = torch.arange(40) // 5
    held = {"private_groups": owners}
    nodes = {
        1: client(tmp_path, 1, **held),
        2: client(tmp_path, 2, private_groups=torch.zeros(40, dtype=torch.int64)),
    }
    sent = []

    def seen(action, replies):
        sent.extend(len(fields["payload"]) for _, fields in replies if action == "answer")
        return replies

    run_round(
        asked(tmp_path, LocalReverseKNN(noise_source=SeededNoise(1)), budget=PERSONS), Wire(nodes, seen)
    )
    assert sent[0] > sent[1]
    found = audit_ledger(tmp_path / "ledger.sqlite")
    assert found["unit"] == "person"
    assert found["epsilon"] == pytest.approx(2.0, rel=1e-4)
    request = asked(
        tmp_path, LocalReverseKNN(noise_source=SeededNoise(1)), budget=PERSONS, name="again"
    ).request("origin")
    for node, persons in ((nodes[1], 8), (nodes[2], 1)):
        message = LocalReverseKNN(budget=Budget(epsilon=2.0, adjacency="replace_one")).protocol(4, CLASSES)
        assert len(decode(node.answer(request), message.bounds, 100)) == persons
    # Each side says which unit, and they must agree.
    with pytest.raises(Refused, match="unit='record', but this node has 'person'"):
        nodes[1].answer(asked(tmp_path, name="third").request("origin"))
    with pytest.raises(ValueError, match="no owner"):
        client(tmp_path, 3, private_groups=owners - 1)
