"""Extractors of others: each vector of one example alone, and what is refused or said where that can't be had."""

import json

import pytest
import pytorch_lightning as pl
import timm
import torch
from torch import nn
from torch.nn import functional as F

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.features import (
    HOG,
    BackboneFeatures,
    CachedFeatures,
    DefaultFeatures,
    Extractor,
    JoinedFeatures,
    PatchDictionary,
    Pixels,
    PublicFeatures,
    PublicPCA,
    Resized,
)
from pl_privknn.features.private_records import kept_apart
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy import Gaussian
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.students import SupervisedStudent
from pl_privknn.training import NoisySGD
from tests.training.noisy_sgd_setup import fit, make_data, make_trainer


def watched(**settings):
    """A teacher that keeps the private vectors which it is given."""
    teacher = PrivateKNN(**settings)
    literal = teacher.fit

    def fit(records):
        teacher.vectors = records.table(fresh=True)
        literal(records)

    teacher.fit = fit
    return teacher


def student_of(network="small_cnn", cls=SupervisedStudent, **kwargs):
    return cls(network=network, num_classes=2, in_channels=1, image_size=8, **kwargs)


def label(folder, features, student=None):
    """The labelling, the private vectors in it, and the private images."""
    table, data = watched(k=5, sampling_rate=1.0, noise=Gaussian(sigma=20.0)), make_data()
    labeling = PrivateLabeler(
        table, queries_per_round=10, features=features, run_dir=folder / "run", options={"progress": False}
    )
    trainer = make_trainer(folder, 1, callbacks=[labeling])
    trainer.fit(student_of() if student is None else student, data)
    return labeling, table.vectors, data.private.images()


def standardizing(images):
    flat = images.flatten(1)
    return (flat - flat.mean(0)) / flat.std(0)


def moved_in_large_batches(images):
    """Mixes more images than there are public ones; the trial can't see it."""
    flat = images.flatten(1)
    return flat + flat.mean(0) if len(images) > 40 else flat


def branching(images):
    """Inverts bright images, in Python."""
    return torch.stack([1 - row if row.mean() > 0.6 else row for row in moved_in_large_batches(images)])


def with_coins(images):
    return nn.functional.dropout(1 + images.flatten(1), 0.5, training=True)


class Standardizing(Extractor):
    def __call__(self, images):
        return standardizing(images)


class AmongOthers(nn.Module):
    """Attention over the examples of a batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(64, 4)

    def features(self, images):
        flat = images.flatten(1)
        return self.layer(flat, flat, flat)[0]

    forward = features


class Remembering(nn.Module):
    """Adds to each vector what it has seen before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, images):
        flat = images.flatten(1)
        vectors = flat + self.seen
        self.seen = self.seen + flat.sum(dim=0)
        return vectors


class OfLightning(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout())

    def forward(self, images):
        return self.layers(images).flatten(1)


class StudentOfMine(SupervisedStudent):
    def features(self, images):
        self.fitted = self.evaluation_network.features(images)
        return 2 * self.fitted


def timm_network():
    return timm.create_model("test_resnet", in_chans=1, num_classes=0)


def seeded(make):
    torch.manual_seed(0)
    return make()


def with_statistics():
    """A function that updates statistics of its own layer."""
    norm = nn.BatchNorm2d(1, affine=False)

    def function(images):  # of one image alone they are those of many
        spread, mean = torch.std_mean(images, dim=(2, 3), keepdim=True, correction=0)
        return norm((images - mean) / spread).flatten(1)

    return function


MIXES = "another vector alone than among others"
REFUSED = [
    (lambda: standardizing, MIXES),
    (lambda: AmongOthers().eval(), MIXES),
    (lambda: BackboneFeatures(AmongOthers()), MIXES),
    (lambda: [[Pixels(), Standardizing()]], MIXES),
    (lambda: JoinedFeatures([Standardizing(), Pixels()]), MIXES),
    (lambda: CachedFeatures(Standardizing()), MIXES),
    (lambda: Resized(Standardizing(), 16), MIXES),
    (lambda: PublicPCA(Standardizing(), 6), MIXES),
    (
        lambda: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()),
        r"layer '0' \(BatchNorm2d\) of Sequential would mix the images of a batch.*\.eval\(\)",
    ),
    (with_statistics, "changes its own tensors.*eval"),
    (nn.Identity, r"Identity returned \(32, 1, 8, 8\) for 32 images; expected \(n, d\)"),
]


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_an_extractor_that_mixes_a_batch_is_refused_before_anything_is_paid(tmp_path, make, match):
    with pytest.raises(ValueError, match=match):
        label(tmp_path, seeded(make))
    assert not (tmp_path / "run" / "run.sqlite").exists()


@pytest.mark.parametrize("make", [OfLightning, timm_network])
def test_a_network_of_others_gives_its_own_vectors_under_the_same_guarantee(tmp_path, make):
    network = seeded(make).eval()
    labeling, found, images = label(tmp_path, network)
    assert labeling.guarantee == "unconditional"
    with torch.no_grad():
        torch.testing.assert_close(found, network(images), atol=1e-5, rtol=1e-5)


def test_dropout_of_a_network_is_off(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5))
    _, found, images = label(tmp_path, network)
    assert torch.equal(found, images.flatten(1))
    assert network.training


def test_a_student_of_others_gives_its_own_vectors_under_the_same_guarantee(tmp_path):
    student = seeded(lambda: student_of(cls=StudentOfMine))
    student.eval()
    images = make_data()
    images.setup("fit")
    with torch.no_grad():
        wanted = student.features(images.private.images())
    student.train()
    labeling, found, _ = label(tmp_path, "student", student)
    assert labeling.guarantee == "unconditional"
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert type(student.fitted) is torch.Tensor  # a trace leaves nothing in the student


def writing(images):
    """Writes in place, which ``vmap`` does not take."""
    made = torch.zeros(len(images), 64)
    made[:, :] = images.flatten(1)
    return made


@pytest.mark.parametrize("features", [moved_in_large_batches, writing])
def test_a_function_sees_one_private_image_at_a_time(tmp_path, features):
    labeling, found, images = label(tmp_path, features)
    assert labeling.guarantee == "unconditional"
    assert torch.equal(found, images.flatten(1))


def test_an_extractor_of_others_is_tried_on_images_of_the_size_that_it_sees(tmp_path):
    class Large(Extractor):
        def __call__(self, images):
            return images.flatten(1) @ torch.eye(256)[:, :8]

    labeling, found, images = label(tmp_path, Resized(Large(), 16))
    assert labeling.guarantee == "unconditional"
    torch.testing.assert_close(found, Resized(Pixels(normalize=False), 16)(images)[:, :8])


def rows_of_itself(images):
    """Rows of each image, chosen by numbers in its first row."""
    return torch.stack([F.embedding(one[0, 0].round().long(), one[0]).flatten() for one in images])


def test_a_number_out_of_range_reads_no_row_of_another_image():
    images = torch.rand(6, 1, 8, 8) * 0.4
    alone, conditions = kept_apart(rows_of_itself, images)
    assert not conditions
    wanted = alone(images)
    torch.testing.assert_close(wanted, rows_of_itself(images))
    images[3, 0, 0, 0] = -1  # the last row of the image before it
    found = alone(images)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4, 5]], wanted[[0, 1, 2, 4, 5]])


def test_operators_that_are_not_in_the_list_run_image_by_image():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 4, batch_first=True)

        def forward(self, images):
            return self.lstm(images[:, 0])[0][:, -1]

    images = torch.rand(4, 1, 8, 8)
    module = Recurrent().eval()
    alone, conditions = kept_apart(module, images)
    torch.testing.assert_close(alone(images), module(images))
    assert (alone._by_vmap, conditions) == (False, ())


def test_no_image_is_remembered(tmp_path):
    labeling, found, images = label(tmp_path, Remembering())
    assert labeling.guarantee == "unconditional"
    first = found[0] - images[0].flatten()
    torch.testing.assert_close(found, images.flatten(1) + first, atol=1e-4, rtol=0)


def test_every_private_image_has_coins_of_its_own(tmp_path):
    labeling, found, images = label(tmp_path, with_coins)
    assert labeling.guarantee == "unconditional"
    kept = found != 0
    torch.testing.assert_close(found[kept], 2 * (1 + images.flatten(1)[kept]))
    assert len(kept.unique(dim=0)) == len(images)


def test_values_in_python_make_the_guarantee_conditional(tmp_path):
    labeling, found, images = label(tmp_path, branching)
    flat = images.flatten(1)
    assert torch.equal(found, torch.where(flat.mean(dim=1, keepdim=True) > 0.6, 1 - flat, flat))
    condition = "branching computes a vector from one example alone"
    assert labeling.report().reason == condition
    summary = labeling.privacy_summary()
    assert (summary["guarantee"], summary["reason"]) == ("conditional", condition)
    stored = Ledger.open_readonly(tmp_path / "run" / "run.sqlite").report().guarantee
    assert (stored.guarantee, stored.reason) == ("conditional", condition)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (written["guarantee"], written["reason"]) == ("conditional", condition)


def test_a_value_that_a_trace_does_not_have_makes_the_guarantee_conditional(tmp_path):
    def scaled(images):
        try:
            return images.flatten(1) / float(images[0, 0, 0, 0]) * images[:, 0, 0, :1]
        except RuntimeError:
            return torch.zeros(len(images), 64)

    labeling, found, images = label(tmp_path, scaled)
    assert labeling.guarantee == "conditional"
    torch.testing.assert_close(found, images.flatten(1))


def test_a_run_goes_on_with_no_condition_that_it_was_not_stated_with(tmp_path):
    label(tmp_path, Pixels())
    with pytest.raises(ValueError, match="stated without the condition that branching computes"):
        label(tmp_path, branching)


def learned(extractor):
    data = make_data()
    data.setup("fit")
    extractor.fit_public(data.public.images())
    return extractor


@pytest.mark.parametrize(
    "make",
    [
        HOG,
        DefaultFeatures,
        lambda: JoinedFeatures([HOG(), Pixels()]),
        lambda: CachedFeatures(HOG()),
        lambda: Resized(HOG(), 16),
        lambda: learned(PublicPCA(Pixels(), 6)),
        lambda: learned(PublicFeatures(6, pretrained=False)),
        lambda: learned(PatchDictionary(patch_size=3, centers=4)),
        lambda: BackboneFeatures(student_of()),
        lambda: BackboneFeatures(student_of("timm:test_resnet", ema_decay=0.9)),
        lambda: BackboneFeatures(student_of("mlp", extractor=HOG())),
    ],
)
def test_extractors_of_ours_stay_as_they_are(make):
    extractor = seeded(make)
    assert kept_apart(extractor, torch.rand(4, 1, 8, 8))[0] is extractor


@pytest.mark.parametrize(
    "make", [lambda: student_of(AmongOthers()), lambda: student_of("mlp", extractor=Standardizing())]
)
def test_a_student_of_ours_that_stands_on_others_is_tried(make):
    student, data = seeded(make), make_data()
    data.setup("fit")
    student.fit_public(data.public)
    with pytest.raises(ValueError, match="another vector alone than among others"):
        kept_apart(BackboneFeatures(student), torch.rand(4, 1, 8, 8))


def train(folder, extractor):
    module = NoisySGD(
        num_classes=2, image_size=8, extractor=extractor, expected_batch_size=30, private_records=90,
        noise_multiplier=1.0, run_dir=folder / "run",
    )  # fmt: skip
    fit(module, folder, 1)
    return module


def test_noisy_sgd_refuses_an_extractor_that_mixes_a_batch(tmp_path):
    with pytest.raises(ValueError, match="another vector alone than among others"):
        train(tmp_path, Standardizing())
    assert not (tmp_path / "run" / "run.sqlite").exists()


def test_noisy_sgd_states_what_its_extractor_rests_on(tmp_path):
    class Branching(Extractor):
        def __call__(self, images):
            return branching(images)

    module = train(tmp_path, Branching())
    assert (
        "Branching computes a vector from one example alone"
        in module.private_training.run.reports()[0].reason
    )
