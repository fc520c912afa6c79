"""The same round carried by Flower: its own messages, serialised as on the wire, between its own apps."""

import contextlib
import importlib
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Context, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from pl_privknn.features import Pixels
from pl_privknn.federated import Shuffler, client_app, new_key, server_app
from pl_privknn.labelers import ShuffledReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from tests.federated.federated_setup import asked, client


@pytest.fixture(autouse=True)
def _run(monkeypatch):
    """The run that Flower's processes are told of when they start."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 0)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)


class MemoryGrid(Grid):
    """Hands messages to a client app in this process, by way of the bytes that gRPC would carry."""

    def __init__(self, app, nodes, stated=None):
        self.app, self.fates, self.stated = app, nodes, stated or {}
        self.states = {node: RecordDict() for node in nodes}

    run = set_run = create_message = push_messages = pull_messages = None  # the apps need none of them

    def get_node_ids(self):
        return list(self.fates)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if self.fates[node] == "drops out":
                continue
            here = {"partition-id": node, "num-partitions": len(self.fates)}
            context = Context(1, node, here, self.states[node], self.stated)
            replies.append(_carried(self.app(_carried(message), context)))
        return replies


def _carried(message):
    proto = message_to_proto(message)
    return message_from_proto(type(proto).FromString(proto.SerializeToString()))


EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "federated"


def test_the_example_of_the_guide_labels_public_digits_as_one_process_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    data, node, server = (
        importlib.import_module(f"digits_app.{name}") for name in ("data", "client", "server")
    )
    stated = {"folder": str(tmp_path), "round": "first", "epsilon": 4.0, "seed": 1}
    grid = MemoryGrid(node.app, dict.fromkeys(range(4), "answers"), stated)
    server.app(grid, Context(1, 0, {}, RecordDict(), stated))

    extractor, asked_for = Pixels(), server.asked(Context(1, 0, {}, RecordDict(), stated))
    with contextlib.closing(sqlite3.connect(tmp_path / "answered-0.sqlite")) as record:
        ((name,),) = record.execute("SELECT name FROM rounds").fetchall()
    protocol, messages = asked_for.message(), []
    for part in range(4):
        images, labels = data.private(part, 4)
        nearest = torch.cdist(extractor(images).double(), asked_for.queries.double()).argmin(
            dim=1, keepdim=True
        )
        noise = SeededNoise(1).stream("node", part).stream("client", name)
        messages.append(protocol.randomize(nearest, labels[:, None], noise))
    one = protocol.aggregate(torch.cat(messages))
    assert torch.equal(stored(tmp_path)["scores"], one.float())

    clusters = torch.from_numpy(data.clusters(extractor(data.public()), 20).labels_).long()
    truth = data.digits()[1][data.PRIVATE :]
    assert (one.argmax(dim=1)[clusters] == truth).double().mean() > 0.7  # 0.80 to 0.89 over five seeds
    assert epsilon(tmp_path) == pytest.approx(4.0, abs=1e-3)


def carried(nodes, config, fates=None):
    """A round through Flower's apps, whose nodes are made anew for each message, as Flower does."""
    app = client_app(lambda context: nodes(int(context.node_config["partition-id"])))
    grid = MemoryGrid(app, dict(fates or dict.fromkeys(range(4), "answers")))
    server_app(config, timeout=1.0)(grid, Context(1, 0, {}, RecordDict(), {}))


def stored(folder, name="first"):
    import numpy as np

    with np.load(folder / f"{name}.npz") as found:
        return {key: torch.from_numpy(found[key]) for key in ("labels", "scores")}


def epsilon(folder):
    ledger = Ledger.open_readonly(folder / "ledger.sqlite")
    try:
        return ledger.report().epsilon
    finally:
        ledger.close()


def test_shuffled_counts_go_through_sealed_envelopes(tmp_path):
    private, public = new_key()

    def node(number):
        if number == 3:
            return Shuffler(private, tmp_path / "mixed.sqlite", SeededNoise(3))
        return client(tmp_path, number, trust="shuffle", shuffler_key=public)

    labeler = ShuffledReverseKNN(
        budget=Budget(epsilon=1.0, adjacency="replace_one"), num_clients=120, noise_source=SeededNoise(1)
    )
    config = asked(tmp_path, labeler)
    carried(node, config)
    scores = stored(tmp_path)["scores"]
    # Estimates of one message a record add up, but for their noise, to the records.
    assert scores.sum() == pytest.approx(120, abs=6 * config.message().deviation(120) * 12**0.5)
    assert epsilon(tmp_path) <= 1.0


def test_a_server_waits_for_its_nodes_and_says_so_where_they_do_not_come(tmp_path):
    with pytest.raises(ValueError, match="num_nodes=5: 4 came in 1 s"):
        carried(lambda node: client(tmp_path, node), asked(tmp_path, num_nodes=5))
