"""Owners of records in tables of one's own, from the file to a run whose unit is a person."""

import numpy as np
import pyarrow.parquet
import pytest
import pytorch_lightning as pl
import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule, EmbeddingsDataModule
from pl_privknn.labelers import SufficientStatistics
from pl_privknn.students import SupervisedStudent
from tests.labelers.statistics.statistics_setup import exact_sum

OWNERS = np.array([5, 3, 5, 5, 9, 3, 0, 9], dtype=np.int32)


def embeddings(folder, owners):
    generator = np.random.default_rng(0)
    np.save(folder / "x.npy", generator.normal(size=(8, 4)).astype(np.float32))
    np.save(folder / "y.npy", np.arange(8) % 2)
    np.save(folder / "public.npy", generator.normal(size=(12, 4)).astype(np.float32))
    return EmbeddingsDataModule(
        str(folder / "x.npy"), str(folder / "y.npy"), str(folder / "public.npy"),
        np.arange(12) % 2, num_classes=2, private_groups=owners, batch_size=4,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["list", "npy", "parquet"])
def test_owners_come_from_arrays_files_and_columns(tmp_path, kind):
    given = OWNERS.tolist()
    if kind == "npy":
        given = str(tmp_path / "owners.npy")
        np.save(given, OWNERS)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"person": OWNERS}), tmp_path / "data.parquet")
        given = f"{tmp_path / 'data.parquet'}:person"
    data = embeddings(tmp_path, given)
    data.setup("fit")
    assert data.private_groups.dtype == torch.int64
    assert data.private_groups.tolist() == OWNERS.tolist()
    images = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = ArraysDataModule(images, OWNERS % 2, images[:4] / 2, num_classes=2, private_groups=given)
    data.setup("fit")
    assert data.private_groups.tolist() == OWNERS.tolist()


def test_owners_that_do_not_fit_are_refused(tmp_path):
    for bad in (OWNERS[:5], OWNERS / 2, np.stack([OWNERS, OWNERS], axis=1)):
        with pytest.raises(
            ValueError, match="private_groups: expected int64, one number for each private record"
        ):
            embeddings(tmp_path, bad).setup("fit")
    with pytest.raises(ValueError, match="private_groups go together"):
        embeddings(tmp_path, str(tmp_path / "owners-{rank}.npy"))


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_run_counts_each_person_once(tmp_path, unit):
    data = embeddings(tmp_path, OWNERS)
    teacher = SufficientStatistics(noise_multiplier=1.0, private_records=4)
    labeling = PrivateLabeler(
        teacher, queries_per_round=4, features=torch.nn.Flatten(), budget={"unit": unit},
        run_dir=tmp_path / unit, options={"progress": False},
    )  # fmt: skip
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[labeling],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(SupervisedStudent(network=network, num_classes=2), data)
    assert labeling.privacy_summary()["unit"] == unit
    # Each record adds a unit vector of labels and one bias of 0.3: the sum's last column counts them.
    counted = exact_sum(teacher, 0, torch.zeros(2, 5, dtype=torch.float64))[:, -1].sum() / 0.3
    assert float(counted) == pytest.approx(4 if unit == "person" else 8, abs=1e-5)
