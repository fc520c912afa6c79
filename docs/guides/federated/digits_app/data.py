"""Who has what: the first 900 digits of the data set are private, the others public."""

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
    """One node's share."""
    images, labels = digits()
    return images[:PRIVATE][part::parts], labels[:PRIVATE][part::parts]


def public() -> torch.Tensor:
    """The server's images; it knows no labels."""
    return digits()[0][PRIVATE:]


def clusters(features: torch.Tensor, count: int) -> KMeans:
    """Public images sorted into clusters, whose means are asked about; each image takes its cluster's label."""
    return KMeans(count, n_init=4, random_state=0).fit(features.numpy())
