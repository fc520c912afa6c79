"""Extractors that learn from public images, where private data is at work."""

import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.features import Pixels, PublicPCA
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.students import SupervisedStudent
from tests.training.noisy_sgd_setup import make_data, make_trainer


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
