"""Features of public images, computed once and shared by extractors of the same arguments."""

import pytest
import torch

from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import HOG, Extractor, JoinedFeatures, PatchDictionary, PublicKernelPCA, PublicPCA
from pl_privknn.features.base import PublicTables
from pl_privknn.features.public import Resized


@pytest.fixture
def public():
    data = DigitsDataModule()
    data.prepare_data()
    data.setup("validate")
    return data.public


@pytest.mark.parametrize(
    "make",
    [
        HOG,
        lambda: PublicPCA(HOG(), 5),
        lambda: PublicKernelPCA(PublicPCA(HOG(), 5), components=9, landmarks=60),
        lambda: PublicPCA(JoinedFeatures([HOG(), Resized(PatchDictionary(4, centers=8, grid=2), 12)]), 5),
    ],
)
def test_a_table_has_the_features_of_an_extractor_that_learned_alone(public, make):
    alone, images = make(), public.images()
    alone.fit_public(images)
    taught = make()
    torch.testing.assert_close(PublicTables(public).features(taught), alone(images), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(taught(images[:9]), alone(images[:9]), atol=1e-4, rtol=1e-3)


def test_an_equal_extractor_takes_the_table_and_what_was_learned(public, monkeypatch):
    first, second = PublicPCA(HOG(), 5), PublicPCA(HOG(), 5)
    table = PublicTables(public).features(first)
    images = public.images(slice(4))
    monkeypatch.setattr(public, "images", None)  # not read again
    assert PublicTables(public).features(second) is table
    assert torch.equal(second(images), first(images))


class _Drawn(Extractor):
    """Two of the same arguments differ."""

    def __init__(self) -> None:
        self.weights = torch.rand(400, 3)

    def __call__(self, images):
        return images.flatten(1) @ self.weights


def test_extractors_of_others_share_nothing(public):
    for extractor in (_Drawn(), _Drawn()):
        table = PublicTables(public).features(extractor)
        torch.testing.assert_close(table, extractor(public.images()))
