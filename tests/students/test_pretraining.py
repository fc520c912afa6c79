"""Representation learning on public images: losses against literal loops, and features that get better."""

import math

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.features import CheckpointFeatures
from pl_privknn.students import SimCLRStudent
from pl_privknn.students.pretraining import contrastive_loss

SMALL = {"network": "small_cnn", "num_classes": 10, "in_channels": 1, "image_size": 20}


def test_contrastive_loss_is_the_literal_sum():
    views = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for i in range(6):
        cosine = [float(torch.cosine_similarity(views[i], views[j], dim=0)) for j in range(6)]
        others = sum(math.exp(cosine[j] / 0.3) for j in range(6) if j != i)
        total -= math.log(math.exp(cosine[(i + 3) % 6] / 0.3) / others)
    assert float(contrastive_loss(views, 0.3)) == pytest.approx(total / 6, rel=1e-5)


def neighbour_accuracy(extractor, data):
    """Leave-one-out accuracy of the nearest neighbour among public images."""
    features = extractor(data.public.images(torch.arange(len(data.public))))
    features = torch.nn.functional.normalize(features, dim=1)
    similarity = features @ features.T
    similarity.fill_diagonal_(-2)
    truth = data.public.truth
    return float((truth[similarity.argmax(dim=1)] == truth).float().mean())


@pytest.mark.long
def test_training_reads_no_label_and_leaves_a_checkpoint_of_features(tmp_path):
    pl.seed_everything(0)
    data = DigitsDataModule(batch_size=32, unlabeled_batch_size=64)
    student = SimCLRStudent(**SMALL)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    trainer = pl.Trainer(
        max_epochs=3,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(student, data)
    assert (data.public.labels == -1).all()
    after = student.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert any(name.startswith("network.") for name in changed)
    assert any(name.startswith("head.") for name in changed)
    assert not any("classifier" in name for name in changed)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    images = data.public.images(torch.arange(5))
    student.eval()
    torch.testing.assert_close(CheckpointFeatures(checkpoint)(images), student.features(images).detach())
    # A floor that neither chance (0.1) nor a checkpoint read wrongly reaches.
    assert neighbour_accuracy(CheckpointFeatures(checkpoint), data) > 0.85
