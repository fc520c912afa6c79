"""Nodes with records, and a transport that carries messages between them without Flower."""

import torch

from pl_privknn.federated import Client, FederatedRound
from pl_privknn.federated.apps import reply_to
from pl_privknn.labelers import LocalReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise

CLASSES = 3
NAME = "plane"


def queries(count=4):
    angles = torch.arange(count) * (6.283185 / count)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def records(node, count=40):
    """Features ``(n, 2)`` and labels of one node: a class lies around a direction."""
    generator = torch.Generator().manual_seed(100 + node)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    features = queries(CLASSES)[labels] + 0.4 * torch.randn(count, 2, generator=generator)
    return features, labels


def coins(node):
    return SeededNoise(7).stream("node", node)


def client(folder, node, seeded=True, **arguments):
    given = {"max_epsilon": 100.0, "record": folder / f"answered-{node}.sqlite", **arguments}
    if seeded:
        given["noise_source"] = coins(node)
    return Client(*records(node), CLASSES, NAME, **given)


def asked(folder, labeler=None, name="first", **arguments):
    labeler = labeler or LocalReverseKNN(
        budget=Budget(epsilon=2.0, adjacency="replace_one"), noise_source=SeededNoise(1)
    )
    files = {"ledger": folder / "ledger.sqlite", "release": folder / f"{name}.npz"}
    return FederatedRound(name, labeler, queries(), CLASSES, NAME, **{**files, **arguments})


class Wire:
    """Carries messages at once; ``changed`` may alter replies on the way, as a node of ill will would.

    Attributes:
        nodes_: by number: a client or a shuffler, or None for one that drops out.
        asked: actions and numbers of nodes, in order.
    """

    def __init__(self, nodes, changed=lambda action, replies: replies):
        self.nodes_, self.changed, self.asked, self.sent = nodes, changed, [], []

    def nodes(self, least):
        return sorted(self.nodes_)

    def ask(self, action, requests):
        replies = []
        for node, fields in requests.items():
            self.asked.append((action, node))
            self.sent.append(dict(fields))
            if self.nodes_[node] is not None:
                replies.append((node, reply_to(action, lambda node=node: self.nodes_[node], fields)))
        return self.changed(action, replies)
