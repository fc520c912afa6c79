import numpy as np
import pytest
import torch
from skimage.feature import hog

from pl_privknn.features import HOG, Extractor
from tests.setup.refusals import refusals


def _reference(images, extractor):
    """scikit-image, one image at a time."""
    grey = images.shape[1] == 1
    return np.stack(
        [
            hog(
                image[0] if grey else image,
                channel_axis=None if grey else 0,
                **{name: getattr(extractor, name) for name in SETTINGS[3]},
            )
            for image in images.numpy()
        ]
    )


def _images(shape, kind, seed=0):
    """Noise; whole grey levels, whose gradients often point along 45 degrees exactly; smooth shapes."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        values = rng.random(shape)
    elif kind == "levels":
        values = rng.integers(0, 6, shape) / 5
    else:
        rows, columns = np.meshgrid(np.arange(shape[2]), np.arange(shape[3]), indexing="ij")
        phase = rng.random((*shape[:2], 1, 1)) * 6
        values = 0.5 + 0.5 * np.sin(rows / 3 + phase) * np.cos(columns / 4 - phase)
    return torch.tensor(values, dtype=torch.float32)


SQUARE_ROOTS = {"transform_sqrt": True}
SETTINGS = [
    {},
    {"orientations": 8, "pixels_per_cell": (8, 8), "cells_per_block": (3, 3), "block_norm": "L2"},
    {"orientations": 4, "pixels_per_cell": (3, 5), "cells_per_block": (2, 1)},
    {"orientations": 7, "pixels_per_cell": 6, "cells_per_block": 1, "block_norm": "L1-sqrt"} | SQUARE_ROOTS,
    {"orientations": 1, "pixels_per_cell": (7, 7), "cells_per_block": (2, 2)},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: ",".join(map(str, s.values())) or "default")
@pytest.mark.parametrize("size", [(28, 28), (29, 33)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("channels", [1, 3])
def test_equals_scikit_image(setting, size, channels):
    extractor = HOG(**setting)
    for kind in ("noise", "levels", "shapes"):
        images = _images((3, channels, *size), kind)
        ours, wanted = extractor(images), _reference(images, extractor)
        assert ours.shape == wanted.shape == (3, extractor.feature_size((channels, *size)))
        assert ours.dtype == torch.float32
        np.testing.assert_allclose(ours.numpy(), wanted, atol=2e-6, rtol=0, err_msg=kind)


def test_flat_images_give_zeros_and_nothing_depends_on_other_images():
    extractor = HOG()
    assert torch.equal(extractor(torch.full((2, 1, 28, 28), 0.7)), torch.zeros(2, 1296))
    images = _images((700, 1, 28, 28), "noise")  # several internal batches
    together = extractor(images)
    picked = torch.tensor([0, 82, 83, 84, 350, 699])
    assert torch.equal(extractor(images[picked]), together[picked])
    assert torch.equal(extractor(images.double()), together)
    assert extractor(images[:0]).shape == (0, 1296)
    assert isinstance(extractor, Extractor)


@pytest.mark.parametrize("shape", [(300, 1, 28, 28), (40, 3, 32, 32), (3, 2, 17, 9), (2, 1, 8, 8)])
def test_compiled_features_are_those_of_tensors(shape):
    """Other devices run the steps on tensors; only the order of sums may differ."""
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    hog = HOG(orientations=7)
    torch.testing.assert_close(hog(images), hog._batch(images).float(), rtol=1e-6, atol=1e-7)


test_errors_name_argument_and_remedy = refusals(
    {
        r"7 x 28 pixels.*8 x 8.*pixels_per_cell=\(4, 4\).*smaller cells": lambda: HOG()(
            torch.zeros(1, 1, 7, 28)
        ),
        "smaller than one block": lambda: HOG().feature_size((3, 28, 5)),
        r"images: shape \(n, 28\)": lambda: HOG()(torch.zeros(28, 28)),
        "Divide whole numbers by 255": lambda: HOG()(torch.zeros(1, 1, 28, 28, dtype=torch.uint8)),
        "transform_sqrt=True": lambda: HOG(transform_sqrt=True)(torch.full((1, 1, 28, 28), -0.123)),
        "block_norm='l2'": lambda: HOG(block_norm="l2"),
        "orientations=0": lambda: HOG(orientations=0),
        "cells_per_block=": lambda: HOG(cells_per_block=(2, 2, 2)),
    }
)
