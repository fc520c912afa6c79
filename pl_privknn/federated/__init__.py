"""Federated reverse kNN over clients that keep their records, with Flower as transport (an extra)."""

from pl_privknn.federated.apps import client_app, server_app
from pl_privknn.federated.messages import Refused, Request, new_key
from pl_privknn.federated.nodes import Client, Shuffler
from pl_privknn.federated.server import FederatedRound, run_round

__all__ = [
    "Client",
    "FederatedRound",
    "Refused",
    "Request",
    "Shuffler",
    "client_app",
    "new_key",
    "run_round",
    "server_app",
]
