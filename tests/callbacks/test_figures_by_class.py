"""Figures by class of a tested run: baseline, balanced accuracy and recall, where they are shown, and the advice."""

import json
import statistics
import types

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, recall_score
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.recipes import regret, rows
from benchmarks.record import entries
from pl_privknn import Budget, PrivateLabeler
from pl_privknn.callbacks import FullSelection
from pl_privknn.callbacks.advice import BATTERY, REGRET, advice_for
from pl_privknn.callbacks.run_summary import RunReport, figures_by_class, largest_share
from pl_privknn.callbacks.tested_models import TestedModels
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features import Pixels, PublicPCA
from pl_privknn.labelers import PreconditionedGradients, ReverseKNN
from pl_privknn.privacy.card import recall_text
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.report import privacy_card, write_report
from tests.setup.grouped import grouped
from tests.setup.small_fit import easy_images, quiet_trainer, small_student

NAMES = ("cat", "dog", "owl")


def uneven():
    """Easy images whose test part has more of the first class."""
    private, labels, public, truth, test, wanted = easy_images(90, 60, 45, noise=0.4)
    kept = torch.tensor([place for place, label in enumerate(wanted.tolist()) if label == 0 or place % 2])
    return ArraysDataModule(
        private, labels, public, public_truth=truth, test_images=test[kept], test_labels=wanted[kept],
        num_classes=3, class_names=NAMES, batch_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("released", ["student", "head"])
def test_every_accuracy_of_a_run_is_beside_the_largest_class_and_recalls_have_names(
    tmp_path, released, capsys
):
    data = uneven()
    teacher = PreconditionedGradients(noise_multiplier=4.0, private_records=90, noise_source=SeededNoise(0))
    given = {"selection": FullSelection(), "released": released, "features": PublicPCA(Pixels(), 6)}
    labeling = PrivateLabeler(teacher, run_dir=tmp_path, **grouped(PrivateLabeler, progress=False, **given))
    student, report = small_student(), RunReport()
    trainer = quiet_trainer(tmp_path, 1, callbacks=[labeling, report])
    trainer.fit(student, data)
    trainer.test(student, data, verbose=False)
    summary = json.loads((tmp_path / "summary.json").read_text())
    images, truth = data.test.images(), data.test.labels
    with torch.no_grad():
        model = labeling.load_head(tmp_path) if released == "head" else student.eval()
        predicted = model(images).argmax(dim=1)
    assert summary["test_baseline"] == pytest.approx(float(truth.bincount().max()) / len(truth), abs=1e-6)
    assert summary["test_balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(truth, predicted), abs=1e-6
    )
    assert list(summary["test_recall"]) == list(NAMES)
    recalls = recall_score(truth, predicted, average=None, labels=range(3), zero_division=0)
    assert list(summary["test_recall"].values()) == pytest.approx(recalls.tolist(), abs=1e-6)
    with torch.no_grad():
        probabilities = model(images) if released == "head" else model(images).softmax(dim=1)
    error = multiclass_calibration_error(probabilities, truth, num_classes=3, n_bins=10)
    assert summary["test_calibration_error"] == pytest.approx(float(error), abs=1e-4)
    counts, means, shares = map(np.array, zip(*summary["test_reliability"], strict=True))
    assert counts.sum() == len(truth)
    assert (counts * means).sum() == pytest.approx(float(probabilities.amax(dim=1).sum()), rel=1e-3)
    assert round((counts * shares).sum()) == int((predicted == truth).sum())
    largest, said = f"largest class {summary['test_baseline']:.3f}", capsys.readouterr().out
    assert "balanced accuracy" in said
    rows = dict(report.table())
    accuracies = [rows[name] for name in rows if "test accuracy" in name]
    assert len(accuracies) == 4
    assert all(text.endswith(f"({largest})") for text in accuracies)
    assert rows["label accuracy"].endswith(f"(largest class {summary['label_baseline']:.3f})")
    assert rows["recall"] == ", ".join(f"{name} {summary['test_recall'][name]:.3f}" for name in NAMES)
    card = privacy_card(tmp_path, exact=False)
    assert largest in card["evaluation"]
    assert f"recall: {rows['recall']}" in card["evaluation"]
    assert largest in card["subject"]
    page = write_report(tmp_path, exact=False).read_text(encoding="utf-8")
    assert f"the largest class is {100 * summary['test_baseline']:.1f} %" in page
    assert "balanced accuracy, the mean recall of the classes" in page
    assert f"{100 * summary['test_calibration_error']:.1f} % on average (expected calibration error" in page
    assert "probability of the prediction" in page


def test_shares_and_recalls_leave_out_what_is_unknown():
    assert largest_share(torch.tensor([0, 1, 1, -1, -1])) == pytest.approx(2 / 3, abs=1e-6)
    assert largest_share(torch.tensor([[1, 0], [1, -1], [0, -1]])) == pytest.approx((2 / 3 + 1) / 2, abs=1e-6)
    assert largest_share(torch.tensor([-1, -1])) is largest_share(None) is None
    found = figures_by_class(torch.tensor([[3, 1, 0], [0, 0, 0], [1, 0, 1]]), ())
    assert found == {"test_balanced_accuracy": 0.625, "test_recall": {"0": 0.75, "1": None, "2": 0.5}}
    assert recall_text(found["test_recall"]) == "0 0.750, 2 0.500, too few records of 1 to say"
    noisy = recall_text({"a": 0.5, "b": 0.9}, {"a": 0.3, "b": 0.01})
    assert noisy == "b 0.900 ± 0.010, too few records of 1 to say"
    many = recall_text({str(place): place / 100 for place in range(62)})
    assert many.startswith("0 0.000, 1 0.010")
    assert many.endswith("42 others are higher")


@pytest.mark.parametrize(
    ("summary", "low"),
    [
        ({"test_accuracy": 0.80, "test_baseline": 0.665}, False),
        ({"test_accuracy": 0.63, "test_baseline": 0.665}, True),
        ({"test_accuracy": 0.63, "test_baseline": 0.1}, False),
        ({"test_accuracy": 0.975, "test_baseline": 0.967}, True),
        ({"test_accuracy": 1.0, "test_baseline": 1.0}, False),
        ({"test_accuracy": 0.63, "test_baseline": None}, False),
        ({"holdout_accuracy": 0.63, "holdout_baseline": 0.665, "holdout_deviation": 0.02}, True),
        ({"holdout_accuracy": 0.63, "holdout_baseline": 0.665, "holdout_deviation": 0.3}, False),
        ({"holdout_accuracy": 0.80, "holdout_baseline": 0.665, "holdout_deviation": 0.02}, False),
    ],
)
@pytest.mark.parametrize("teacher", [ReverseKNN, PreconditionedGradients])
def test_the_advice_follows_the_largest_class_and_names_no_recommendation(summary, low, teacher):
    data = types.SimpleNamespace(task="multiclass", image_shape=(30,), public=np.zeros(9), num_classes=10)
    given = {} if teacher is ReverseKNN else {"private_records": 600}
    labeling = types.SimpleNamespace(
        labeler=teacher(**given), features=[Pixels()], metrics={}, budget=Budget(epsilon=0.5)
    )
    said = advice_for(types.SimpleNamespace(datamodule=data), labeling, summary)
    assert bool(said) == low
    assert "recommends" not in said
    if low:
        assert "gets 0." in said
        assert ("released gradients instead of votes (1.1 points" in said) == (teacher is ReverseKNN)
        ratio = (
            "classes is 30; twice as much brought 1 points); votes instead of released gradients (9.6 points)"
        )
        assert (ratio in said) == (teacher is not ReverseKNN)
        assert "labelled public examples" in said
        labelled = advice_for(
            types.SimpleNamespace(datamodule=data), labeling, {**summary, "label_baseline": 0.2}
        )
        assert "labelled public examples" not in labelled


def test_the_points_of_the_advice_are_those_of_the_stored_battery():
    sets = {"digits", "fashion", "shirts", "news", "mnist", "uneven", "cells"}
    classes = {part: entry["results"]["classes"] for part, entry in entries("recipes").items()}
    found = {(part, n, epsilon): means for part, n, epsilon, means in rows() if part in sets}
    for low, (high, votes, gradients, rise) in zip([0, *(row[0] for row in BATTERY)], BATTERY, strict=False):
        cells = {
            key: means for key, means in found.items() if low < key[1] * key[2] / classes[key[0]] <= high
        }
        for name, lost in {"ReverseKNN": votes, "PreconditionedGradients": gradients}.items():
            each = [means["none"] - means[name] for means in cells.values() if name in means]
            assert lost == pytest.approx(100 * statistics.median(each), abs=0.06)
        doubled = [
            found[part, n, 2 * epsilon]["recommended"] - means["recommended"]
            for (part, n, epsilon), means in cells.items()
            if (part, n, 2 * epsilon) in found
        ]
        assert rise == pytest.approx(100 * statistics.median(doubled), abs=0.5)  # of rules that may change
    regrets = [missed for means in found.values() if (missed := regret(means)) is not None]
    assert pytest.approx(100 * statistics.mean(regrets), abs=0.5) == REGRET


@pytest.mark.parametrize(
    ("outputs", "batch_of", "counted"),
    [
        (3, lambda x, y: (x, y), True),
        (3, lambda x, y: {"x": x, "y": y}, False),
        (3, lambda x, y: (x, len(x) * y, y), False),
        (1, lambda x, y: (x, y), False),
        (1, lambda x, y: (x, y.float()), False),
        (2, lambda x, y: (x, 5 * y), False),
    ],
)
def test_only_pairs_of_examples_and_classes_are_counted(outputs, batch_of, counted):
    module, x, y = torch.nn.Linear(4, outputs), torch.rand(6, 4), torch.arange(6) % 2
    tested = TestedModels(module, None, None)
    module(x)
    tested.add(batch_of(x, y))
    assert bool(tested.confusions) == counted
