import copy
import pickle

import pytest
import torch

from pl_privknn.features import HOG, CachedFeatures, Extractor, PublicPCA


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
    monkeypatch.setattr("pl_privknn.features.joined._KNOWN", {})
    monkeypatch.setattr(_Counted, "shown", 0)
    return _Counted


def test_each_image_is_computed_once_and_given_in_the_order_asked(counted, images):
    remembered = CachedFeatures(counted())
    assert torch.equal(remembered(images[:4]), images[:4].flatten(1))
    again = CachedFeatures(counted())(images[[6, 2, 0, 6]])
    assert torch.equal(again, images[[6, 2, 0, 6]].flatten(1))
    assert counted.shown == 4 + 2  # image 6 stood in the batch twice


def test_other_arguments_other_shapes_and_other_public_images_are_other_features(counted, images):
    CachedFeatures(counted())(images)
    assert torch.equal(CachedFeatures(counted(2.0))(images), images.flatten(1) ** 2)
    wide = images.reshape(7, 1, 4, 16)
    CachedFeatures(counted())(wide)
    assert counted.shown == 3 * 7
    first, second = (CachedFeatures(PublicPCA(extractor=HOG(), components=3)) for _ in range(2))
    first.fit_public(images)
    expected = first(images)
    second.fit_public(images[:5])
    own = PublicPCA(extractor=HOG(), components=3)
    own.fit_public(images[:5])
    assert torch.allclose(second(images), own(images))
    assert torch.equal(first(images), expected)  # what the second learned did not reach the first


def test_an_extractor_that_learns_anew_leaves_what_others_share_as_it_was(counted, images):
    one, again = (CachedFeatures(PublicPCA(extractor=HOG(), components=3)) for _ in range(2))
    one.fit_public(images)
    one.fit_public(images[:5])
    again.fit_public(images)
    own = PublicPCA(extractor=HOG(), components=3)
    own.fit_public(images)
    assert torch.allclose(again(images), own(images))


def test_a_state_that_differs_begins_anew_and_changes_nothing_for_others(counted, images):
    first = CachedFeatures(PublicPCA(extractor=HOG(), components=3))
    first.fit_public(images)
    expected, state = first(images), copy.deepcopy(first.state_dict())
    same = CachedFeatures(PublicPCA(extractor=HOG(), components=3))
    same.fit_public(images)
    same.load_state_dict(state)
    assert same.extractor is first.extractor
    other = PublicPCA(extractor=HOG(), components=3)
    other.fit_public(images[:5])
    same.load_state_dict(other.state_dict())
    assert torch.allclose(same(images), other(images))
    assert torch.equal(first(images), expected)


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


def test_what_cannot_be_known_again_is_refused(images):
    with pytest.raises(TypeError, match="extractor="):
        CachedFeatures(torch.nn.Flatten())

    class WithTensor(_Counted):
        def __init__(self, weights: torch.Tensor) -> None:
            self.weights = weights

    with pytest.raises(ValueError, match="weights is no plain value"):
        CachedFeatures(WithTensor(torch.ones(2)))
