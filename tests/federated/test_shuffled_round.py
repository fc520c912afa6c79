"""A round through a shuffling node: the cost of the crowd, envelopes, and mixing once."""

import pytest
import torch

from pl_privknn.federated import Refused, Request, Shuffler, run_round
from pl_privknn.federated import nodes as nodes_module
from pl_privknn.federated.messages import decode, encode
from pl_privknn.labelers import ShuffledReverseKNN
from pl_privknn.labelers.local import amplified_epsilon, make_randomizer
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import ShuffleAmplification
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from tests.federated.federated_setup import CLASSES, Wire, asked, client, queries

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _open_envelopes(monkeypatch):
    """Envelopes that anyone could open: what is tested here is who does with them what. Sealing has its own tests."""

    def opened(envelope, private_key, about):
        if envelope[:64] != private_key + about:
            raise ValueError("it does not open")
        return envelope[64:]

    monkeypatch.setattr(nodes_module, "seal_envelope", lambda message, key, about: key + about + message)
    monkeypatch.setattr(nodes_module, "open_sealed", opened)


def nodes(folder, clients=4):
    made = {node: client(folder, node, trust="shuffle", shuffler_key=KEY) for node in range(clients)}
    return {**made, 9: Shuffler(KEY, folder / "mixed.sqlite", SeededNoise(3))}


def config(folder, num_clients=100, **arguments):
    labeler = ShuffledReverseKNN(
        budget=Budget(epsilon=0.5, adjacency="replace_one"),
        num_clients=num_clients,
        noise_source=SeededNoise(1),
        **arguments,
    )
    return asked(folder, labeler)


def request(count=20, name="first", **stated):
    given = {"round": name, "epsilon": 1.0, "num_classes": CLASSES, "trust": "shuffle", "extractor": "a"}
    return Request.about(queries(), **{**given, "min_records": count, **stated})


def envelopes(asked_for, rows=10, clients=2, key=KEY):
    protocol = make_randomizer(asked_for.randomizer, asked_for.epsilon, asked_for.table)
    sent = torch.arange(rows * clients)
    messages = torch.stack([sent, torch.zeros_like(sent)], dim=1).split(rows)
    return [key + asked_for.digest + encode(part, protocol.bounds) for part in messages]


def mixed(node, asked_for, sent):
    protocol = make_randomizer(asked_for.randomizer, asked_for.epsilon, asked_for.table)
    return decode(node.mix(asked_for, sent, 200), protocol.bounds, 1000)[:, 0].tolist()


def test_counts_through_the_shuffler_are_those_of_all_messages_and_cost_what_one_process_says(tmp_path):
    wire, made = Wire(nodes(tmp_path)), config(tmp_path)
    release = run_round(made, wire)
    (local,) = {fields["epsilon"] for fields in wire.sent if fields.get("round")}
    assert local == amplified_epsilon(0.5, 1e-5, 100)
    protocol = made.labeler.protocol(4, CLASSES)
    order = next(fields for fields in wire.sent if "envelopes" in fields)
    unmixed = torch.cat(
        [decode(sent[64:], protocol.randomizer.bounds, 40) for sent in sorted(order["envelopes"])]
    )
    assert torch.equal(release.scores, protocol.aggregate(unmixed).float())
    ledger = Ledger.open_readonly(tmp_path / "ledger.sqlite")
    (charge,) = ledger.report().charged
    assert charge.mechanism == ShuffleAmplification(local, 100)
    assert ledger.report().epsilon <= 0.5
    ledger.close()


def test_a_crowd_too_small_is_handed_on_not_at_all_and_stays_paid_for(tmp_path, caplog):
    with pytest.raises(RuntimeError, match="no node answered"):
        run_round(config(tmp_path, num_clients=161), Wire(nodes(tmp_path)))
    assert "160 messages are fewer than min_records=161" in caplog.text
    ledger = Ledger.open_readonly(tmp_path / "ledger.sqlite")
    assert len(ledger.report().charged) == 1
    ledger.close()


def test_a_round_without_its_shuffler_or_by_shares_is_refused_before_anything_is_paid(tmp_path):
    made = nodes(tmp_path)
    for wrong in ({**made, 8: made[9]}, {0: made[0]}):
        with pytest.raises(ValueError, match="1 shuffling nodes"):
            run_round(config(tmp_path), Wire(wrong))
    with pytest.raises(ValueError, match="randomizer='shares'"):  # an envelope shows how many they are
        config(tmp_path, randomizer="shares")


def test_messages_are_handed_on_in_an_order_of_the_system_generator(tmp_path):
    node = Shuffler(KEY, tmp_path / "mixed.sqlite")
    assert isinstance(node.noise_source, SystemNoise)
    found = mixed(node, request(400), envelopes(request(400), rows=200))
    assert sorted(found) == list(range(400))
    assert found != sorted(found)  # with a chance of 1 in 400! where they are mixed
    # Where a message lies says nothing of who sent it: the first sender's 200 places have a mean of 199.5 and a
    # deviation of about 8.2 over all orders; six of them is one chance in 10^9.
    places = [found.index(number) for number in range(200)]
    assert abs(sum(places) / 200 - 199.5) < 6 * 8.2


def test_a_round_is_mixed_once(tmp_path):
    first, second = envelopes(request(10))
    mixed(Shuffler(KEY, tmp_path / "mixed.sqlite"), request(10), [first, second])
    for sent in ([first], [first, second]):
        with pytest.raises(Refused, match="answers a round once"):
            mixed(Shuffler(KEY, tmp_path / "mixed.sqlite"), request(10), sent)


def test_a_crowd_that_is_refused_may_still_grow_and_envelopes_that_come_twice_count_once(tmp_path):
    node, (first, second) = Shuffler(KEY, tmp_path / "mixed.sqlite"), envelopes(request())
    for sent in ([first], [first, first]):
        with pytest.raises(Refused, match="10 messages are fewer than min_records=20"):
            node.mix(request(), sent, 100)
    assert len(mixed(node, request(), [first, second])) == 20


@pytest.mark.parametrize("changed", [{"min_records": 2}, {"epsilon": 9.0}, {"name": "second"}])
def test_envelopes_for_another_request_do_not_open(tmp_path, changed):
    # Clients were told of 20; a server that tells the shuffler otherwise gets nothing.
    with pytest.raises(Refused, match="0 messages are fewer"):
        Shuffler(KEY, tmp_path / "mixed.sqlite").mix(request(**changed), envelopes(request()), 100)


def test_ill_made_envelopes_are_left_out(tmp_path):
    good = envelopes(request(10), clients=1)
    ill = [
        b"",
        KEY + request(10).digest + b"\xff" * 9,
        KEY + request(10).digest + bytes(9 * 201),
        good[0][:-1],
    ]
    assert len(mixed(Shuffler(KEY, tmp_path / "mixed.sqlite"), request(10), good + ill)) == 10


def test_it_mixes_under_shuffle_alone_and_wants_a_key(tmp_path):
    with pytest.raises(Refused, match="trust='local'"):
        Shuffler(KEY, tmp_path / "a").mix(request(0, trust="local"), [], 1)
    with pytest.raises(ValueError, match="key: 31 bytes"):
        Shuffler(bytes(31), tmp_path / "a")
