"""The accuracy of labels' student on a hold-out of private records, of which the teacher learns nothing."""

import json

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn import PrivateLabeler
from pl_privknn.callbacks import FullSelection
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features import Pixels
from pl_privknn.labelers import PrivateKNN, SufficientStatistics
from pl_privknn.privacy import Gaussian, Ledger
from pl_privknn.privacy.holdout import PaidEvaluation, held_out
from pl_privknn.privacy.noise import SeededNoise, default_noise
from pl_privknn.students import SupervisedStudent
from tests.setup.grouped import grouped
from tests.setup.small_fit import easy_images, quiet_trainer, small_student

HALF, PRIVATE = PaidEvaluation(0.5), 300


class Watched(PrivateKNN):
    """Notes how many records it learns from."""

    seen = 0

    def learn(self, records):
        self.seen = len(records)
        super().learn(records)


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


@pytest.mark.parametrize("released", ["student", "head", "ensemble", "auto"])
def test_of_attributes_it_is_the_mean_share_of_right_ones(tmp_path, monkeypatch, released):
    monkeypatch.setattr(Gaussian, "add_noise", lambda self, values, noise: values.double())
    rows = torch.rand(PRIVATE, 4, generator=torch.Generator().manual_seed(0)) < 0.4
    images, public = (torch.rand(count, 1, 4, 4) * 0.2 for count in (PRIVATE, 60))
    images[:, 0, 0] += rows * 0.8
    public[:, 0, 0] += (torch.rand(60, 4) < 0.4) * 0.8
    data = ArraysDataModule(images, rows.long(), public, task="multilabel", num_classes=4, batch_size=16)
    teacher = SufficientStatistics(
        noise_multiplier=1.0, private_records=PRIVATE // 2, task="multilabel", noise_source=SeededNoise(0)
    )
    options = {"selection": FullSelection(), "released": released, "features": Pixels(), "evaluate": HALF}
    labeling = PrivateLabeler(teacher, run_dir=tmp_path, **grouped(PrivateLabeler, progress=False, **options))
    student = SupervisedStudent("linear_probe", 4, in_channels=1, image_size=4, task="multilabel")
    quiet_trainer(tmp_path, 3, callbacks=[labeling]).fit(student, data)
    held = held_out(HALF, tmp_path, labeling.run_id, torch.arange(PRIVATE), True, data.private_batches)
    with torch.no_grad():
        own = student.eval()(images[held]).sigmoid()
    made = {
        "student": own,
        "head": (head := labeling.load_head(tmp_path)(images[held])),
        "ensemble": (own + head) / 2,
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    chosen = summary["released"] if released == "auto" else released
    right = float(((made[chosen] > 0.5) == rows[held]).double().mean())
    assert summary["holdout_accuracy"] == pytest.approx(right, abs=1e-4)
    assert 0.5 < right < 1


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


class Branching(Foreign):
    """Can't be traced: its Python looks at values."""

    def forward(self, x):
        return self.net(x) if float(x.mean()) < 2 else -self.net(x)


class LaterBranching(Foreign):
    """Can be traced before the training alone."""

    late = False

    def on_train_start(self):
        self.late = True

    def forward(self, x):
        return -self.net(x) if self.late and float(x.mean()) > 2 else self.net(x)


def test_a_student_that_cannot_be_traced_any_more_makes_its_accuracy_conditional(tmp_path):
    labeling, *_ = fit(tmp_path, default_noise(), LaterBranching(), retrain=False)
    assert labeling.guarantee == "unconditional"  # of the labels, which no student's prediction enters
    guarantee = Ledger.open_readonly(tmp_path / "holdout.sqlite").report().guarantee
    assert guarantee.guarantee == "conditional"
    assert "LaterBranching computes a vector from one example alone" in guarantee.reason


@pytest.mark.parametrize(
    ("student", "level"),
    [(None, "unconditional"), (Foreign, "unconditional"), (Branching, "conditional")],
)
def test_a_student_that_cannot_be_traced_is_a_condition(tmp_path, student, level):
    labeling, *_ = fit(tmp_path, default_noise(), student and student(), retrain=False)
    assert labeling.guarantee == level
    guarantee = Ledger.open_readonly(tmp_path / "holdout.sqlite").report().guarantee
    assert guarantee.guarantee == level
    said = "Branching computes a vector from one example alone"
    assert (said in guarantee.reason) == (level == "conditional")


def test_a_shared_ledger_is_refused():
    with pytest.raises(ValueError, match="evaluate: the hold-out is charged in parallel with one run"):
        PrivateLabeler(PrivateKNN(5), evaluate=PaidEvaluation(), options={"ledger_path": "shared.sqlite"})


class MixingHead(SufficientStatistics):
    """A teacher of others whose model looks at a whole batch."""

    def head(self, state):
        predict = super().head(state)
        return lambda features: predict(features).roll(len(features) // 2, dims=0)


def test_a_released_model_of_others_predicts_each_held_out_record_alone(tmp_path):
    data = ArraysDataModule(*easy_images(PRIVATE, 60, 30), num_classes=3, batch_size=16)
    teacher = MixingHead(noise_multiplier=1.0, private_records=PRIVATE // 2, noise_source=SeededNoise(0))
    given = {"selection": FullSelection(), "released": "head", "features": Pixels(), "evaluate": HALF}
    labeling = PrivateLabeler(teacher, run_dir=tmp_path, **grouped(PrivateLabeler, progress=False, **given))
    with pytest.raises(ValueError, match="another vector alone than among others"):
        quiet_trainer(tmp_path, 1, callbacks=[labeling]).fit(small_student(), data)
