"""The server: its queries, their ε, and the ledger that is charged."""

from pathlib import Path

import torch
from flwr.app import Context

from digits_app.data import CLASSES, clusters, public
from pl_privknn import Budget, LocalReverseKNN, Pixels, SeededNoise
from pl_privknn.federated import FederatedRound, server_app


def asked(context: Context) -> FederatedRound:
    """Return one round whose queries are the means of twenty clusters of public images."""
    run, extractor = context.run_config, Pixels()
    folder, name, seed = Path(str(run["folder"])), str(run["round"]), int(run["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    return FederatedRound(
        name=name,
        labeler=LocalReverseKNN(
            budget=Budget(epsilon=float(run["epsilon"]), adjacency="replace_one"),
            randomizer="collision",
            noise_source=None if seed < 0 else SeededNoise(seed),
        ),
        queries=torch.from_numpy(clusters(extractor(public()), 20).cluster_centers_),
        num_classes=CLASSES,
        extractor=extractor,
        ledger=folder / "ledger.sqlite",
        release=folder / f"{name}.npz",
        budget=Budget(epsilon=8.0, adjacency="replace_one"),
        num_nodes=4,
    )


app = server_app(asked, timeout=600.0)
