"""The accuracy of labels' student on a hold-out of private records, of which the teacher learns nothing."""

import json

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn import PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features import Pixels
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy import Gaussian, Ledger
from pl_privknn.privacy.holdout import PaidEvaluation, held_out
from pl_privknn.privacy.noise import SeededNoise, default_noise
from tests.setup.grouped import grouped
from tests.setup.small_fit import easy_images, quiet_trainer, small_student

HALF, PRIVATE = PaidEvaluation(0.5), 300


class Watched(PrivateKNN):
    """Notes how many records it learns from."""

    seen = 0

    def fit(self, features, labels, num_classes):
        self.seen = len(labels)
        super().fit(features, labels, num_classes)


def fit(folder, noise=None, student=None, **given):
    data = ArraysDataModule(*easy_images(PRIVATE, 60, 30), num_classes=3, batch_size=16)
    kind = Watched if noise is None else PrivateKNN
    teacher = kind(5, 1.0, noise=Gaussian(4.0), noise_source=noise or SeededNoise(0))
    given = {"queries_per_round": 40, "features": Pixels(), "evaluate": HALF, "progress": False, **given}
    labeling = PrivateLabeler(teacher, run_dir=folder, **grouped(PrivateLabeler, **given))
    student = student or small_student()
    quiet_trainer(folder, 3, callbacks=[labeling]).fit(student, data)
    return labeling, student, data


def test_the_teacher_learns_from_the_others_and_the_accuracy_is_the_students(tmp_path, monkeypatch):
    monkeypatch.setattr(Gaussian, "add_noise", lambda self, values, noise: values.double())
    labeling, student, data = fit(tmp_path)
    held = held_out(HALF, tmp_path, labeling.run_id, torch.arange(PRIVATE), True, data.private_batches)
    assert labeling.labeler.seen == int((~held).sum()) < PRIVATE
    assert len(data.private) == PRIVATE  # afterwards all are there again
    with torch.no_grad():
        right = student.eval()(data.private.images(held)).argmax(1) == data.private.labels[held]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["holdout_accuracy"] == pytest.approx(float(right.float().mean()), abs=1e-4)
    assert 0.99 * summary["epsilon"] < summary["holdout_epsilon"] <= summary["epsilon"]


def test_a_person_is_wholly_in_one_part(tmp_path):
    owners = torch.arange(PRIVATE) // 3
    held = held_out(HALF, tmp_path, "run", owners, False)
    data = ArraysDataModule(*easy_images(PRIVATE, 60, 30), num_classes=3)
    data.setup("fit")
    data.private_groups = owners
    out, restore = data.hold_out(held)
    assert not set(data.private_groups.tolist()) & set(owners[held].tolist())
    assert len(out) + len(data.private) == PRIVATE
    torch.testing.assert_close(out.images(), easy_images(PRIVATE)[0][held])
    restore()
    assert torch.equal(data.private_groups, owners)


class Foreign(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch["labeled"][0]), batch["labeled"][1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("student", "level"), [(None, "unconditional"), (Foreign, "conditional")])
def test_a_student_of_others_is_a_condition(tmp_path, student, level):
    labeling, *_ = fit(tmp_path, default_noise(), student and student(), retrain=False)
    assert labeling.guarantee == level
    guarantee = Ledger.open_readonly(tmp_path / "holdout.sqlite").report().guarantee
    assert guarantee.guarantee == level
    said = "Foreign predicts a held-out record from that record alone"
    assert (said in guarantee.reason) == (level == "conditional")


def test_a_shared_ledger_is_refused():
    with pytest.raises(ValueError, match="evaluate: the hold-out is charged in parallel with one run"):
        PrivateLabeler(PrivateKNN(5), evaluate="paid", options={"ledger_path": "shared.sqlite"})
