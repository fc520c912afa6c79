"""A node: its records and its privacy limits."""

from pathlib import Path

from flwr.app import Context

from digits_app.data import CLASSES, private
from pl_privknn import Pixels, SeededNoise
from pl_privknn.federated import Client, client_app


def node(context: Context) -> Client:
    """On a real node its owner sets the path of the record and max_epsilon in ``--node-config``, not the server."""
    part, parts = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    images, labels = private(part, parts)
    seed = int(context.run_config["seed"])
    return Client(
        images,
        labels,
        CLASSES,
        Pixels(),
        trust="local",
        max_epsilon=8.0,
        record=Path(str(context.run_config["folder"])) / f"answered-{part}.sqlite",
        noise_source=None if seed < 0 else SeededNoise(seed).stream("node", part),
    )


app = client_app(node)
