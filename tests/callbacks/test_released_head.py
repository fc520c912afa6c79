"""The head of a run: saved, judged beside the student, averaged with it."""

import json

import pytest
import pytorch_lightning as pl
import torch

from pl_privknn.callbacks import PrivateLabeler, RunReport
from pl_privknn.callbacks.labeling_round import load_head
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features import Pixels, PublicPCA
from pl_privknn.labelers import PreconditionedGradients, SufficientStatistics
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.report import write_report
from pl_privknn.students import SupervisedStudent
from tests.setup.small_fit import easy_images, quiet_trainer, small_student
from tests.training.noisy_sgd_setup import make_data


def run(folder, labeler, features, released="student", data=None, **student):
    """A short run and its test; the student, the data module and the summary."""
    pl.seed_everything(0)
    labeling = PrivateLabeler(
        labeler, queries_per_round=20, epochs_per_round=2, features=features, released=released,
        run_dir=folder, options={"progress": False},
    )  # fmt: skip
    trainer = quiet_trainer(folder, 2, callbacks=[labeling, RunReport(folder)])
    student = SupervisedStudent(**student) if student else small_student(2)
    data = data or make_data()
    trainer.fit(student, data)
    trainer.test(student, data, verbose=False)
    return student, data, json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("released", ["student", "head", "ensemble"])
def test_head_student_and_mean_are_judged_on_the_test_set(tmp_path, released):
    settings = {"noise_multiplier": 0.5, "private_records": 90}
    student, data, summary = run(tmp_path, SufficientStatistics(**settings), PublicPCA(Pixels(), 6), released)
    # Another process, with the same settings and the files of the run.
    head = load_head(tmp_path, SufficientStatistics(**settings), PublicPCA(Pixels(), 6))
    images, truth = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    student.eval()
    with torch.no_grad():
        models = {"student": student(images).softmax(dim=1), "head": head(images)}
    models["ensemble"] = (models["student"] + models["head"]) / 2
    for name, probabilities in models.items():
        accuracy = float((probabilities.argmax(dim=1) == truth).double().mean())
        assert summary[f"{name}_test_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert summary["released"] == released
    assert summary["test_accuracy"] == summary[f"{released}_test_accuracy"]
    assert summary["head_test_accuracy"] > 0.8


@pytest.mark.parametrize(("lr", "model"), [(1.0, "ensemble"), (1e-9, "head")])
def test_auto_is_the_ensemble_where_student_and_head_agree_on_public_examples_and_else_the_head(
    tmp_path, lr, model
):
    own = {"network": "linear_probe", "num_classes": 2, "image_size": 8, "extractor": PublicPCA(Pixels(), 6)}
    own["optimization"] = {"optimizer": "sgd", "lr": lr}
    teacher = SufficientStatistics(noise_multiplier=0.1, private_records=90, noise_source=SeededNoise(0))
    student, data, summary = run(
        tmp_path, teacher, PublicPCA(Pixels(), 6), "auto", make_data(batch_size=2), **own
    )
    images = data.public.images()
    with torch.no_grad():
        taught = student.eval()(images).argmax(dim=1)
    head = load_head(tmp_path, teacher, PublicPCA(Pixels(), 6))(images).argmax(dim=1)
    agreement = float((taught == head).double().mean())
    assert agreement > 0.9 if model == "ensemble" else agreement < 0.8
    assert summary["released"] == model
    assert summary["test_accuracy"] == summary[f"{model}_test_accuracy"]


def test_student_and_head_of_one_extractor_share_the_features_of_a_test_batch(tmp_path, monkeypatch):
    shown, compute, test = [], Pixels.__call__, pl.Trainer.test
    monkeypatch.setattr(
        Pixels, "__call__", lambda self, images: (shown.append(len(images)), compute(self, images))[1]
    )
    monkeypatch.setattr(pl.Trainer, "test", lambda *args, **kwargs: (shown.clear(), test(*args, **kwargs))[1])
    settings, features = {"noise_multiplier": 0.5, "private_records": 90}, lambda: PublicPCA(Pixels(), 6)
    own = {"network": "linear_probe", "num_classes": 2, "image_size": 8, "extractor": features()}
    _, data, summary = run(tmp_path, SufficientStatistics(**settings), features(), "ensemble", **own)
    assert sum(shown) == len(data.test)
    head = load_head(tmp_path, SufficientStatistics(**settings), features())
    right = head(data.test.images()).argmax(dim=1) == data.test.labels
    assert summary["head_test_accuracy"] == pytest.approx(float(right.double().mean()), abs=1e-6)


def test_a_resumed_run_has_its_head(tmp_path):
    settings = {"noise_multiplier": 0.5, "private_records": 90, "releases": 2}
    first, second = (
        run(tmp_path, PreconditionedGradients(**settings), PublicPCA(Pixels(), 6))[2] for _ in range(2)
    )
    assert second["head_test_accuracy"] == first["head_test_accuracy"]
    assert second["epsilon_spent"] == first["epsilon_spent"]


def test_what_a_released_centre_found_is_in_summary_report_and_card(tmp_path):
    teacher = SufficientStatistics(noise_multiplier=0.1, private_records=90, centre_share=0.3)
    data = make_data(
        lambda **parts: ArraysDataModule(**{**parts, "public_images": 1 - parts["public_images"]})
    )
    _, _, summary = run(tmp_path, teacher, PublicPCA(Pixels(), 6), "head", data)
    assert "public examples are of another kind" in summary["remark"]
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert summary["remark"] in page
    assert summary["remark"][:20] in (tmp_path / "privacy_card.md").read_text(encoding="utf-8")


def test_a_report_without_public_data_shows_no_query_and_one_with_them_calls_labels_labels(tmp_path, capsys):
    teacher = SufficientStatistics(noise_multiplier=0.1, private_records=90)
    run(tmp_path / "public", teacher, PublicPCA(Pixels(), 6), "head")
    page = write_report(tmp_path / "public").read_text(encoding="utf-8")
    assert "labels public examples: no query was asked" in page
    (images, labels), _, test = (easy_images(90, 90, 30, classes=2)[start : start + 2] for start in (0, 2, 4))
    data = ArraysDataModule(images, labels, None, None, *test, num_classes=2, public="none")
    run(tmp_path / "alone", teacher, Pixels(), "head", data)
    page = write_report(tmp_path / "alone").read_text(encoding="utf-8")
    assert "queries" not in page.partition("<footer")[0].partition("<pre>")[0]
    assert 'id="answers"' not in page
    assert "queries answered" not in capsys.readouterr().out
