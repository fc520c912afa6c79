"""Under add_remove the number of private records is private: two neighbouring sets leave the same traces."""

import re

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar

from pl_privknn._progress import progress_bars
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PrivateKNN
from pl_privknn.labelers.partitions import RandomPartition
from pl_privknn.neighbors import PoissonNeighbors
from pl_privknn.privacy import redaction
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.record_budgets import read_ids
from tests.labelers.multilabel.attributes_setup import attribute_knn
from tests.setup.small_fit import fit_student
from tests.training.noisy_sgd_setup import PRIVATE, make, make_data, make_trainer


def fewer(private_images, private_labels, **kwargs):
    """The same data without its last private record."""
    return ArraysDataModule(private_images=private_images[:-1], private_labels=private_labels[:-1], **kwargs)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_shows_the_same_of_neighbouring_sets(tmp_path, capfd, bar):
    for cls in (ArraysDataModule, fewer):
        trainer = make_trainer(tmp_path / cls.__name__, callbacks=[bar()], enable_progress_bar=True)
        trainer.fit(make(), make_data(cls))
        shown = "".join(capfd.readouterr())
        assert "Epoch" in shown
        # Neither rates, times nor shares, which hold points, colons and signs of per cent.
        assert not re.search(rf"(?<![\d.:])({PRIVATE}|{PRIVATE - 1})(?![\d.:%])", shown)


def test_progress_on_private_records_has_no_numbers(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(
        "pl_privknn.callbacks.private_labeler.progress_bars", lambda _, before: progress_bars(True, before)
    )
    fit_student(
        tmp_path, PrivateKNN(5, 0.9, noise_source=SeededNoise(0)), 0.1, private=53, queries_per_round=10
    )
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", capfd.readouterr().out)
    lines = {line for line in re.split(r"[\r\n]", shown) if line.startswith("round")}
    assert {re.sub(r"[━╸╺ ]+$", "", line) for line in lines if "fitting" in line} == {
        "round 1/1: fitting the private teacher"
    }
    assert any("querying the private teacher" in line and "10/10" in line for line in lines)


N = 4711


def table(labels=N, dtype=torch.float32):
    return torch.zeros(N, 3, dtype=dtype), torch.zeros(labels, dtype=torch.int64)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PrivateRecords.of(*table(N - 1), 2),
        lambda: PrivateRecords.of(*table(dtype=torch.int64), 2),
        lambda: PrivateKNN(N + 1, 1.0).fit(PrivateRecords.of(*table(), 2)),
        lambda: attribute_knn(5).fit(PrivateRecords.of(*table(), 2)),
        lambda: PrivateRecords.of(*table(), 2, owners=torch.zeros(N - 1, dtype=torch.int64)),
        lambda: RandomPartition().assign(
            *table(), num_classes=2, num_parts=N + 1, noise=SeededNoise(0)
        ),
        lambda: PoissonNeighbors(*table(N - 1), 2, 5, 0.5),
        lambda: read_ids(np.arange(N - 1), N),
        lambda: ArraysDataModule(
            torch.zeros(N, 1, 4, 4), torch.zeros(N - 1), torch.zeros(3, 1, 4, 4), num_classes=2
        ).setup("fit"),
        lambda: ArraysDataModule(
            torch.zeros(N, 1, 4, 4), torch.zeros(N - 1, dtype=torch.int64), torch.zeros(3, 1, 4, 4), num_classes=2
        ).setup("fit"),
    ],
)  # fmt: skip
def test_messages_about_a_private_table_do_not_tell_its_length(wrong):
    with pytest.raises(ValueError, match=r"\w") as caught:
        wrong()
    numbers = {int(number) for number in re.findall(r"\d+", str(caught.value))}
    assert not numbers & {N, N - 1}
    assert "\n" not in str(caught.value)


def test_the_time_of_private_work_is_left_out_of_the_seconds_that_a_summary_states(monkeypatch):
    clock = [5.0]
    monkeypatch.setattr(redaction.time, "monotonic", lambda: clock[0])

    def work(seconds):
        clock[0] += seconds
        if seconds > 1:
            redaction.redacted(work, seconds / 2)

    before = redaction.private_seconds()
    redaction.redacted(work, 4)
    work(0.5)
    assert redaction.private_seconds() - before == 7
