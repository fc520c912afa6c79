"""Evaluation sets and the parts of a data module, and the digits."""

import pytest
import torch
from torch.utils.data import TensorDataset

from pl_privknn.datamodules import DigitsDataModule, PrivatePublicDataModule
from pl_privknn.datamodules.datasets import fixed_shuffle
from tests.datamodules.datamodule_setup import (
    CLASSES,
    PRIVATE,
    PUBLIC,
    TEST,
    Recorder,
    loaded,
    make_data,
    number_of,
    numbered,
    trainer,
)

# ---------------------------------------------------------------------------- evaluation and parts


def test_evaluation_sets(tmp_path):
    truth = torch.arange(PUBLIC) % CLASSES
    truth[::4] = -1
    module, model = make_data(public_truth=truth), Recorder()
    runner = trainer(tmp_path)
    runner.validate(model, module, verbose=False)
    numbers, labels = (torch.cat(part) for part in zip(*model.evaluated["val"], strict=True))
    assert numbers.tolist() == [i for i in range(PUBLIC) if i % 4]
    assert torch.equal(labels, truth[numbers])
    runner.test(model, module, verbose=False)
    numbers, labels = (torch.cat(part) for part in zip(*model.evaluated["test"], strict=True))
    assert numbers.tolist() == list(range(2000, 2000 + TEST))
    assert torch.equal(labels, (numbers - 2000) % CLASSES)
    assert torch.cat(runner.predict(model, module)).tolist() == list(range(2000, 2000 + TEST))
    with pytest.raises(RuntimeError, match="private data isn't loaded"):
        _ = module.private  # evaluation never loads it


def test_private_images_come_in_batches_and_in_order():
    data = loaded()
    images, labels = zip(*data.private_batches(8), strict=True)
    assert [len(part) for part in images] == [8, 8, 8, 6]
    assert number_of(torch.cat(images)).tolist() == list(range(1000, 1000 + PRIVATE))
    assert torch.equal(torch.cat(labels), torch.arange(PRIVATE) % CLASSES)
    assert number_of(data.private.images(slice(3, 5))).tolist() == [1003, 1004]
    assert images[0].dtype == torch.float32
    image, label = data.private[4]
    assert (int(number_of(image)), label) == (1004, 1)


def test_overlap_of_public_and_test_images():
    both = torch.cat([numbered(2000, TEST - 1), numbered(17, 1)])
    for images in (both, both / 255):  # the same pixels as floats are the same image
        with pytest.raises(ValueError, match=r"public example 17 is test example 11.*overlap="):
            make_data(test_images=images, overlap="error").setup("fit")
    for stages in (["fit"], ["test", "fit"], ["validate", "fit"]):
        data = make_data(test_images=both)
        with pytest.warns(UserWarning, match="1 public example in the test part .* left out of the public"):
            list(map(data.setup, stages))
        assert number_of(data.public.images()).tolist() == [n for n in range(PUBLIC) if n != 17]
        assert torch.equal(data.public.truth, loaded().public.truth[number_of(data.public.images())])
    with pytest.raises(ValueError, match="no other public example is left"):
        make_data(test_images=numbered(0, PUBLIC), test_labels=torch.zeros(PUBLIC).long()).setup("fit")
    for overlap in ("warn", "ignore"):
        data = make_data(test_images=both, overlap=overlap)
        data.setup("fit")
        assert len(data.public) == PUBLIC


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_classes": 1}, "num_classes=1"),
        ({"seed": -1}, "seed=-1"),
        ({"overlap": "fine"}, "overlap='fine'"),
        ({"class_names": ["a", "b", "b"]}, "class_names: 2 different names"),
    ],
)
def test_bad_options_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_data(**arguments)


class Pairs(PrivatePublicDataModule):
    """Ordinary data sets of ``(x, y)``, of one and of another kind of item."""

    def __init__(self, public):
        super().__init__(num_classes=CLASSES, image_shape=(1, 1, 2), batch_size=4)
        self.public_part = public

    def load_private(self):
        return [(image.numpy(), row % CLASSES) for row, image in enumerate(numbered(1000, PRIVATE))]

    def load_public(self):
        return self.public_part

    def load_test(self):
        return TensorDataset(numbered(2000, TEST).float() / 255, torch.arange(TEST) % CLASSES)


def test_ordinary_data_sets_of_pairs(tmp_path):
    pairs = Pairs([(image, torch.tensor(row % CLASSES)) for row, image in enumerate(numbered(0, PUBLIC))])
    pairs.setup("fit")
    expected = loaded()
    for part in ("private", "public", "test"):
        assert torch.equal(getattr(pairs, part).images(), getattr(expected, part).images())
    assert torch.equal(pairs.private.labels, expected.private.labels)
    assert pairs.public.truth.tolist() == [row % CLASSES for row in range(PUBLIC)]
    pairs.public.set_labels([3, 4], [1, 2])
    model = Recorder()
    trainer(tmp_path, epochs=1).fit(model, pairs)
    assert model.seen(0) == {3: 1, 4: 2}
    unlabeled = Pairs(list(numbered(0, PUBLIC)))
    unlabeled.setup("fit")
    assert unlabeled.public.truth is None


# ---------------------------------------------------------------------------- digits


def test_digits_split_is_fixed_and_complete():
    from sklearn.datasets import load_digits

    module = DigitsDataModule(image_size=8)
    assert (module.num_classes, module.image_shape) == (10, (1, 8, 8))
    module.setup("fit")
    parts = (module.private, module.public, module.test)
    assert [len(part) for part in parts] == [1000, 500, 297]
    source = load_digits()
    order = fixed_shuffle(1797, 0)
    assert order[:5].tolist() == [1335, 392, 942, 404, 87]  # must never change
    assert sorted(order.tolist()) == list(range(1797))
    images = torch.cat([part.images() for part in parts])[:, 0]
    labels = torch.cat([module.private.labels, module.public.truth, module.test.labels])
    known = torch.tensor(source.images[order] / 16).float()
    torch.testing.assert_close(images, known, atol=0.501 / 255, rtol=0)
    assert labels.tolist() == source.target[order].tolist()
