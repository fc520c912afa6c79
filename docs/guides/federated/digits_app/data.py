"""Split of the data: the first 900 digits of the data set are private, the others public."""

import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

CLASSES = 10
PRIVATE = 900


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, float32 ``(n, 1, 8, 8)``, and labels, int64 ``(n,)``."""
    loaded = load_digits()
    return torch.from_numpy(loaded.images).float()[:, None] / 16, torch.from_numpy(loaded.target).long()


def private(part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of one node."""
    images, labels = digits()
    return images[:PRIVATE][part::parts], labels[:PRIVATE][part::parts]


def public() -> torch.Tensor:
    """Return the images of the server, without labels."""
    return digits()[0][PRIVATE:]


def clusters(features: torch.Tensor, count: int) -> KMeans:
    """Cluster public images; the means are the queries, and each image gets the label of its cluster."""
    return KMeans(count, n_init=4, random_state=0).fit(features.numpy())
