"""Extractors that learn from public images."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import KernelPCA

from pl_privknn.features import (
    HOG,
    DefaultFeatures,
    JoinedFeatures,
    PatchDictionary,
    Pixels,
    PublicFeatures,
    PublicKernelPCA,
    PublicPCA,
    Scattering,
    public,
)
from pl_privknn.features.scattering import low_pass, morlet
from pl_privknn.features.whitening import PublicWhitening
from tests.setup.refusals import refusals


def images(count, channels=1, side=8, seed=0):
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def patches(**others):
    return PatchDictionary(**{"patch_size": 3, "centers": 7, "grid": 2, **others})


MADE = {
    "patches": patches,
    "scattering": lambda: Scattering(1, 4),
    "pca": lambda: PublicPCA(patches(), 5),
    "kernel": lambda: PublicKernelPCA(PublicPCA(Pixels(transform_sqrt=True), 6), components=9),
    "landmarks": lambda: PublicKernelPCA(HOG(pixels_per_cell=2), components=9, landmarks=12),
    "joined": lambda: JoinedFeatures([HOG(pixels_per_cell=2), PublicPCA(patches(), 5)], [0.3, 0.7]),
}


@pytest.mark.parametrize("name", MADE)
def test_learned_from_public_images_alone_and_each_image_by_itself(name, monkeypatch):
    public, private = images(30, 2), images(40, 2, seed=1)
    extractor = MADE[name]()
    assert extractor.learns
    with pytest.raises(RuntimeError, match=r"learn from public examples first"):
        extractor(private)
    extractor.fit_public(public)
    with monkeypatch.context() as patch:
        patch.setattr(extractor, "learn", lambda images: pytest.fail("learned again"))
        extractor.fit_public(public.clone())
    features = extractor(private)
    assert features.dtype == torch.float32
    assert features.shape == (40, extractor.feature_size((2, 8, 8)))
    assert bool(features.isfinite().all())
    # Neither the images that were seen before nor the company of others change an image's features.
    again = torch.cat([extractor(private[20:]), extractor(private[3:4])])
    torch.testing.assert_close(again, torch.cat([features[20:], features[3:4]]), atol=2e-5, rtol=1e-4)
    # The same public images give the same extractor, and so does what it learned.
    other, restored = MADE[name](), MADE[name]()
    other.fit_public(public)
    restored.load_state_dict(copy.deepcopy(extractor.state_dict()))
    torch.testing.assert_close(other(private), features, atol=0, rtol=0)
    torch.testing.assert_close(restored(private), features, atol=0, rtol=0)
    other.fit_public(images(30, 2, seed=2))
    assert not torch.allclose(other(private), features, atol=1e-3)


def test_patch_activations_equal_the_formula_pixel_by_pixel():
    extractor, public = patches(grid=4), images(12, 2)
    extractor.fit_public(public)
    learned = {name: value.double().numpy() for name, value in extractor.state_dict().items()}
    picture = np.pad(images(1, 2, seed=5)[0].double().numpy(), ((0, 0), (1, 1), (1, 1)))
    activations = np.zeros((8, 8, 7))
    for row in range(8):
        for column in range(8):
            patch = picture[:, row : row + 3, column : column + 3].ravel()
            patch = (patch - patch.mean()) / math.sqrt(patch.var() + 0.01)
            white = (patch - learned["mean"]) @ learned["whitening"]
            distances = np.array([math.dist(white, center) for center in learned["centers"]])
            activations[row, column] = np.maximum(0, distances.mean() - distances)
    cells = activations.reshape(4, 2, 4, 2, 7).mean(axis=(1, 3))
    torch.testing.assert_close(
        extractor(images(1, 2, seed=5))[0].double(), torch.from_numpy(cells.ravel()), atol=2e-4, rtol=1e-3
    )


def literal_scattering(picture, scales, orientations):
    """Sums of products over periodic pixels, at the resolutions of the definition."""
    height, width = picture.shape
    shape = [((side >> scales) + 2) << scales for side in picture.shape]
    before = [(side - inner) // 2 for side, inner in zip(shape, picture.shape, strict=True)]
    borders = [
        (start, side - inner - start) for start, side, inner in zip(before, shape, picture.shape, strict=True)
    ]
    signal = np.pad(picture, borders, mode="reflect")
    phi = np.outer(*(low_pass(side, scales) for side in shape))

    def convolved(values, kernel, step):
        """values ∗ kernel at every ``step``-th pixel."""
        rows, columns = values.shape
        result = np.zeros((rows // step, columns // step), dtype=np.complex128)
        for row in range(0, rows, step):
            for column in range(0, columns, step):
                picked = kernel[
                    np.ix_((row - np.arange(rows)) % rows, (column - np.arange(columns)) % columns)
                ]
                result[row // step, column // step] = (values * picked).sum()
        return result

    def wave(scale, place, at):
        kernel = morlet(tuple(shape), scale, math.pi * place / orientations, 4 / orientations)
        return 4**at * kernel[:: 2**at, :: 2**at]

    def averaged(values, at):
        smooth = convolved(values, 4**at * phi[:: 2**at, :: 2**at], 2 ** (scales - at)).real
        return smooth[1:-1, 1:-1][: height >> scales, : width >> scales]

    first, second = [averaged(signal, 0)], []
    for j1 in range(scales):
        for place in range(orientations):
            u1 = np.abs(convolved(signal, wave(j1, place, 0), 2**j1))
            first.append(averaged(u1, j1))
            for j2 in range(j1 + 1, scales):
                for other in range(orientations):
                    u2 = np.abs(convolved(u1, wave(j2, other, j1), 2 ** (j2 - j1)))
                    second.append((j1, place, j2, other, averaged(u2, j2)))
    return np.stack([*first, *(entry[-1] for entry in second)])


def test_scattering_in_groups_is_normalised_image_by_image():
    plain, alone = Scattering(normalize=False), Scattering(normalize=False, groups=27)
    pictures = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    groups = plain(pictures).view(3, 27, -1).double()
    deviations = groups.var(dim=2, unbiased=False, keepdim=True).add(1e-5).sqrt()
    expected = (groups - groups.mean(dim=2, keepdim=True)) / deviations
    assert not any(one.learns for one in (alone, HOG(), JoinedFeatures([HOG(), Pixels()])))
    torch.testing.assert_close(alone(pictures).double(), expected.flatten(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone(pictures[1:2]), alone(pictures)[1:2])


@pytest.mark.parametrize(("scales", "orientations", "side"), [(1, 3, 5), (2, 2, 9), (3, 1, 16)])
def test_scattering_equals_literal_convolutions(scales, orientations, side):
    extractor = Scattering(scales, orientations, normalize=False)
    pictures = images(2, 2, side)
    found = extractor(pictures).view(2, 2, extractor.channels, side >> scales, side >> scales)
    for picture in range(2):
        expected = literal_scattering(pictures[picture, 1].double().numpy(), scales, orientations)
        torch.testing.assert_close(
            found[picture, 1].double(), torch.from_numpy(expected), atol=2e-5, rtol=1e-4
        )


def test_wavelets_have_mean_zero_and_the_average_has_one():
    for scale in range(3):
        assert abs(morlet((48, 40), scale, 0.3, 0.5).sum()) < 1e-12
    assert low_pass(48, 2).sum() == pytest.approx(1, abs=1e-3)
    assert Scattering().channels == 81


def test_public_channels_have_mean_zero_and_deviation_one():
    extractor, public = Scattering(1, 2), images(20)
    extractor.fit_public(public)
    values = extractor(public).view(20, 3, -1)
    torch.testing.assert_close(values.mean(dim=(0, 2)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std(dim=(0, 2), correction=0), torch.ones(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("landmarks", [None, 15])
def test_kernel_components_are_those_of_scikit_learn(landmarks):
    public, private = images(40), images(6, seed=3)
    extractor = PublicKernelPCA(
        Pixels(normalize=True), gamma=2.0, components=8, power=0.0, landmarks=landmarks
    )
    extractor.fit_public(public)
    chosen = extractor.state_dict()["landmarks"].double().numpy()
    assert len(chosen) == (landmarks or 40)
    reference = KernelPCA(8, kernel="rbf", gamma=2.0).fit(chosen)
    expected = reference.transform(Pixels(normalize=True)(private).double().numpy())
    expected = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    found = extractor(private).double()
    signs = (found * expected).sum(dim=0).sign()
    torch.testing.assert_close(found * signs, expected, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("count", [5, 100])  # few are found by random projections
def test_wide_features_have_nearly_the_directions_of_svd(count):
    values = (
        torch.randn(300, 2100, generator=torch.Generator().manual_seed(0)) * torch.arange(2100).add(1).rsqrt()
    )
    change = PublicWhitening(2100, count, 0.0).fit(values)
    centred = (values - values.mean(0)).double()
    exact = torch.linalg.svd(centred, full_matrices=False)[2][:count].T
    # Angles between the two subspaces.
    cosines = torch.linalg.svdvals(exact.T @ change.directions.double())
    assert float(cosines.min()) > 0.999


def learned(extractor, *shape):
    return lambda: extractor.fit_public(torch.rand(shape))


test_bad_arguments_are_named = refusals(
    {
        "patch_size=1": lambda: patches(patch_size=1),
        "gamma=-1": lambda: PublicKernelPCA(HOG(), gamma=-1.0),
        "components=0": lambda: PublicPCA(HOG(), components=0),
        "scales=0": lambda: Scattering(scales=0),
        "groups=7 must divide the 81 channels": lambda: Scattering(groups=7),
        "scales=2 needs at least 8 pixels": learned(Scattering(2), 4, 1, 7, 7),
        "144 patches of 3 x 3 pixels, fewer than centers=500": learned(patches(centers=500), 4, 1, 8, 8),
        r"images: shape \(n, 8, 8\)": learned(patches(), 4, 8, 8),
    }
)


@pytest.mark.parametrize(("channels", "suited"), [(1, HOG()), (3, PublicFeatures(pretrained=False))])
def test_default_features_suit_the_images(channels, suited, monkeypatch):
    monkeypatch.setattr(public, "has_pretrained", lambda: False)
    given = images(30, channels, side=20)
    chosen, again = DefaultFeatures(), DefaultFeatures()
    for extractor in (chosen, suited):
        extractor.fit_public(given)
    again.load_state_dict(chosen.state_dict())
    for extractor in (chosen, again):
        assert torch.equal(extractor(given[:3]), suited(given[:3]))
    assert chosen.feature_size((channels, 20, 20)) == suited.feature_size((channels, 20, 20))
