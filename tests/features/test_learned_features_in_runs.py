"""Extractors that learn from public images, where private data is at work."""

import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.features import Pixels, PublicPCA
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.students import SupervisedStudent
from pl_privknn.training import NoisySGD
from tests.training.noisy_sgd_setup import fit, make_data, make_trainer


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


def test_a_checkpoint_of_noisy_sgd_holds_what_its_extractor_learned(tmp_path):
    extractor, data = Noting(), make_data()
    module = NoisySGD(
        num_classes=2, image_size=8, extractor=extractor, expected_batch_size=30, private_records=90,
        optimization={"lr": 1.0}, noise_multiplier=1.0, feature_head={"components": 4},
        run_dir=tmp_path / "run",
    )  # fmt: skip
    trainer = fit(module, tmp_path, 1, data=data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    (seen,) = extractor.seen
    assert torch.equal(seen, data.public.images())
    loaded = NoisySGD.load_from_checkpoint(tmp_path / "last.ckpt", extractor=PublicPCA(Pixels(), 6))
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(images), module(images), atol=0, rtol=0)
