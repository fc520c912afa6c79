import copy
import pickle

import pytest
import torch

from pl_privknn.features import HOG, CachedFeatures, Extractor, PublicPCA
from tests.setup.refusals import refusals


class _Counted(Extractor):
    """Says how many images it was shown."""

    shown = 0

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def __call__(self, images):
        type(self).shown += len(images)
        return images.flatten(1) ** self.power


@pytest.fixture
def images():
    return torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def counted(monkeypatch):
    for name in ("_KNOWN", "_LEARNED"):
        monkeypatch.setattr(f"pl_privknn.features.joined.{name}", {})
    monkeypatch.setattr(_Counted, "shown", 0)
    return _Counted


def test_each_image_is_computed_once_and_given_in_the_order_asked(counted, images):
    remembered = CachedFeatures(counted())
    assert torch.equal(remembered(images[:4]), images[:4].flatten(1))
    again = CachedFeatures(counted())(images[[6, 2, 0, 6]])
    assert torch.equal(again, images[[6, 2, 0, 6]].flatten(1))
    assert counted.shown == 4 + 2  # image 6 stood in the batch twice


def test_copies_share_and_files_hold_no_vector(counted, images):
    remembered = CachedFeatures(PublicPCA(extractor=counted(), components=3))
    remembered.fit_public(images)
    expected, shown = remembered(images), counted.shown
    assert torch.equal(copy.deepcopy(remembered)(images), expected)
    assert counted.shown == shown
    written = pickle.dumps(CachedFeatures(HOG()))
    many = CachedFeatures(HOG())
    many(images)
    assert pickle.dumps(many) == written
    assert torch.allclose(pickle.loads(pickle.dumps(remembered))(images), expected)


def projection(images=None):
    """A remembered extractor, fitted where there are images; its features are those of one that is not shared."""
    extractor = CachedFeatures(PublicPCA(extractor=HOG(), components=3))
    if images is not None:
        extractor.fit_public(images)
    return extractor


def test_other_arguments_shapes_public_images_and_states_are_other_features(counted, images):
    CachedFeatures(counted())(images)
    assert torch.equal(CachedFeatures(counted(2.0))(images), images.flatten(1) ** 2)
    CachedFeatures(counted())(images.reshape(7, 1, 4, 16))
    assert counted.shown == 3 * 7
    wanted = {}
    for count in (5, 7):
        own = PublicPCA(extractor=HOG(), components=3)
        own.fit_public(images[:count])
        wanted[count] = own(images), own.state_dict()
    first, other = projection(images), projection(images[:5])
    anew = projection(images)
    anew.fit_public(images[:5])
    loaded = projection(images)
    loaded.load_state_dict(copy.deepcopy(wanted[7][1]))
    loaded.load_state_dict(wanted[5][1])
    # What one of them learned reaches no other.
    for extractor, count in (
        (first, 7),
        (other, 5),
        (anew, 5),
        (loaded, 5),
        (projection(images), 7),
        (first, 7),
    ):
        torch.testing.assert_close(extractor(images), wanted[count][0])


class WithTensor(_Counted):
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights


test_what_cannot_be_known_again_is_refused = refusals(
    {
        "extractor=": lambda: CachedFeatures(torch.nn.Flatten()),
        "weights is no plain value": lambda: CachedFeatures(WithTensor(torch.ones(2))),
    }
)
