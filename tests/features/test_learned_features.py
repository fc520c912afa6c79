"""Extractors that learn from public images, alone, joined and in a run."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import KernelPCA

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.features import (
    HOG,
    DefaultFeatures,
    JoinedFeatures,
    PatchDictionary,
    Pixels,
    PublicFeatures,
    PublicKernelPCA,
    PublicPCA,
    public,
)
from pl_privknn.features.public import PublicWhitening
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.students import SupervisedStudent
from tests.setup.refusals import refusals
from tests.training.noisy_sgd_setup import make_data, make_trainer


def images(count, channels=1, side=8, seed=0):
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def patches(**others):
    return PatchDictionary(**{"patch_size": 3, "centers": 7, "grid": 2, **others})


MADE = {
    "patches": patches,
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


def test_squared_distances_add_up_by_weight():
    images = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    parts = [HOG(), Pixels()]
    joined = JoinedFeatures(parts, weights=[2.0, 0.5])(images)
    expected = sum(
        weight * torch.cdist(unit, unit) ** 2
        for weight, unit in zip(
            (2.0, 0.5), [torch.nn.functional.normalize(part(images)) for part in parts], strict=True
        )
    )
    torch.testing.assert_close(torch.cdist(joined, joined) ** 2, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(JoinedFeatures(parts, weights=[2.0, 0.5])(images[2:3])[0], joined[2])


class Noting(PublicPCA):
    def __init__(self):
        super().__init__(Pixels(), 6)
        self.seen = []

    def learn(self, images):
        self.seen.append(images)
        return super().learn(images)


def test_a_round_learns_from_all_public_images_and_no_private_one(tmp_path):
    extractor, data = Noting(), make_data()
    labeler = PrivateLabeler(
        ReverseKNN(1, budget=Budget(epsilon=4.0)),
        rounds=2,
        epochs_per_round=1,
        queries_per_round=10,
        features=extractor,
        run_dir=tmp_path / "run",
        options={"progress": False, "query_batch_size": 4},
    )
    student = SupervisedStudent(network="small_cnn", num_classes=2, in_channels=1, image_size=8)
    make_trainer(tmp_path, 2, callbacks=[labeler]).fit(student, data)
    assert labeler.label_counts()["answered"] == 20
    (seen,) = extractor.seen
    assert torch.equal(seen, data.public.images())


def learned(extractor, *shape):
    return lambda: extractor.fit_public(torch.rand(shape))


test_bad_arguments_are_named = refusals(
    {
        "patch_size=1": lambda: patches(patch_size=1),
        "gamma=-1": lambda: PublicKernelPCA(HOG(), gamma=-1.0),
        "components=0": lambda: PublicPCA(HOG(), components=0),
        "144 patches of 3 x 3 pixels, fewer than centers=500": learned(patches(centers=500), 4, 1, 8, 8),
        "extractors": lambda: JoinedFeatures([]),
        "weights=.*1.0, 2": lambda: JoinedFeatures([HOG()], [1.0, 2.0]),
        "weights=0": lambda: JoinedFeatures([HOG()], [0.0]),
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
