"""What the tests of the papers' data sets share: all of them written small, and comparisons by bytes."""

import numpy as np
import torch
from paper_data import write_celeba, write_cifar10, write_cifar100, write_market, write_svhn

SVHN_SMALL = {"num_public": 25, "num_test": 10}
CIFAR_SMALL = {"num_private": 30, "num_public": 29, "num_test": 10}
CELEBA_SMALL = {"num_public": 20, "image_size": 24}
MARKET_SMALL = {"num_public_people": 4, "image_size": 32, "verify": False}


def as_bytes(images):
    return [image.tobytes() for image in (images * 255).round().to(torch.uint8).numpy()]


def sizes(data):
    return [len(part) for part in (data.private, data.public, data.test)]


def disjoint(data):
    parts = [as_bytes(part.images()) for part in (data.private, data.public, data.test)]
    everything = [image for part in parts for image in part]
    return len(set(everything)) == len(everything)


def source(images, labels):
    """Bytes of each image -> its label."""
    return {
        np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes(): int(label)
        for image, label in zip(images, labels, strict=True)
    }


def assert_labels_stay_with_images(part, labels, known):
    for image, label in zip(as_bytes(part.images()), labels.tolist(), strict=True):
        assert known[image] == label


def write_papers(root):
    """All data sets; what each was made of."""
    contents = {
        "svhn": write_svhn(root / "SVHN"),
        "cifar10": write_cifar10(root),
        "celeba": write_celeba(root),
        "market": write_market(root),
    }
    write_cifar100(root)
    return contents
