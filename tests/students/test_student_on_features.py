"""Students whose network sees frozen features in place of images."""

import math

import pytest
import torch
from torch import nn

from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import HOG, PublicPCA
from pl_privknn.networks import Normalization
from pl_privknn.students import FixMatchStudent, SupervisedStudent, UDAStudent, VATStudent
from tests.setup.refusals import refusals
from tests.students.student_setup import trainer


def make(kind=SupervisedStudent, extractor=None, **settings):
    extractor = PublicPCA(HOG(), components=12) if extractor is None else extractor
    arguments = {"network": "mlp", "num_classes": 10, "in_channels": 1, "image_size": 20} | settings
    return kind(extractor=extractor, **arguments)


def labelled_digits():
    data = DigitsDataModule(batch_size=64)
    data.prepare_data()
    data.setup("fit")
    data.public.set_labels(slice(None), data.public.truth)
    return data


def test_the_network_sees_what_features_and_public_mean_give(tmp_path):
    student, data = make(ema_decay=0.9), labelled_digits()
    fit = trainer(tmp_path)
    fit.fit(student, data)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    public, images = data.public.images(), torch.rand(5, 1, 20, 20)
    extractor = PublicPCA(HOG(), components=12)
    extractor.fit_public(public)
    vectors = extractor(images) - extractor(public).double().mean(dim=0).float()
    seen = vectors / vectors.norm(dim=1, keepdim=True) * math.sqrt(12)
    student.eval()
    with torch.no_grad():
        torch.testing.assert_close(student(images), student.ema.network(seen), atol=1e-4, rtol=1e-4)
        encoded = student.ema.network.encoder(seen)
        torch.testing.assert_close(student.features(images), encoded, atol=1e-4, rtol=1e-4)
        # A checkpoint holds what was learned from public images.
        again = SupervisedStudent.load_from_checkpoint(
            tmp_path / "last.ckpt", extractor=PublicPCA(HOG(), components=12), weights_only=True
        )
        torch.testing.assert_close(again.eval()(images), student(images))


@pytest.mark.parametrize("kind", [UDAStudent, FixMatchStudent])
def test_students_learn_the_digits_on_features(tmp_path, kind):
    student, data = make(kind, HOG()), labelled_digits()
    quiet = trainer(tmp_path, max_epochs=3)
    quiet.fit(student, data)
    assert quiet.validate(student, data, verbose=False)[0]["val/accuracy"] > 0.8


def test_a_resumed_fit_trains_on_what_the_checkpoint_learned(tmp_path):
    student, data = make(), labelled_digits()
    fit = trainer(tmp_path)
    fit.fit(student, data)
    student.extractor.load_state_dict(
        {name: -value for name, value in student.extractor.state_dict().items()}
    )
    fit.save_checkpoint(tmp_path / "last.ckpt")
    again = make()
    trainer(tmp_path, max_epochs=2).fit(again, data, ckpt_path=tmp_path / "last.ckpt")
    batch = next(iter(data.val_dataloader()))[0]
    images = data.public.images(slice(len(batch)))
    torch.testing.assert_close(again.vectors(batch), again.vectors(images))


test_what_does_not_fit_is_refused = refusals(
    {
        "VATStudent needs gradients at pixels": lambda: make(VATStudent),
        "expected an Extractor, such as HOG": lambda: make(extractor=nn.Flatten()),
        "leave mean and std out": lambda: make(normalization=Normalization((0.5,), (0.5,))),
        "image_size=.* does not fit network='small_cnn'": lambda: make(network="small_cnn"),
    }
)
