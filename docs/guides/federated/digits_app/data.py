"""Who has what: the even digits of the data set are private, the odd ones public."""

import torch
from sklearn.datasets import load_digits

CLASSES = 10


def images_and_labels(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second one: images, float32 ``(n, 1, 8, 8)``, and labels, int64 ``(n,)``."""
    digits = load_digits()
    images = torch.from_numpy(digits.images[first::2]).float()[:, None] / 16
    return images, torch.from_numpy(digits.target[first::2]).long()


def private(part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One node's share."""
    images, labels = images_and_labels(0)
    return images[part::parts], labels[part::parts]


def public() -> tuple[torch.Tensor, torch.Tensor]:
    """The server's images, and the labels that it must not know, to see how good its own are."""
    return images_and_labels(1)
