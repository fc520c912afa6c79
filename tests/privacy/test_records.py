"""Data sets of private records: repeated rows, code of others that reads them, evaluation on them."""

import json

import pyarrow as pa
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from pl_privknn import PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule, DatasetsDataModule
from pl_privknn.datamodules.datasets import ChosenImages, LabeledImages
from pl_privknn.features import Pixels
from pl_privknn.labelers import PrivateKNN
from pl_privknn.labelers.base import stated_plan
from pl_privknn.privacy.noise import default_noise
from pl_privknn.privacy.records import has_repeated_rows
from tests.setup.small_fit import easy_images, quiet_trainer, small_student
from tests.testing.broken_labelers import Honest
from tests.training.noisy_sgd_setup import PRIVATE, make_data
from tests.training.training_setup import Lit, fit, training

TABLE = TensorDataset(torch.rand(PRIVATE, 1, 8, 8), torch.arange(PRIVATE) % 2)


class Own(Dataset):
    def __len__(self):
        return PRIVATE

    def __getitem__(self, row):
        return TABLE[row]


class Data(pl.LightningDataModule):
    def __init__(self, train, validation=None):
        super().__init__()
        self.train, self.validation = train, validation

    def train_dataloader(self):
        return DataLoader(self.train, 10) if not isinstance(self.train, DataLoader) else self.train

    def val_dataloader(self):
        return [] if self.validation is None else DataLoader(self.validation, 10)


def train(folder, data, **kwargs):
    return fit(Lit(), folder, training(noise_source=None, **kwargs), 1, data=data)[0]


REPEATED = {
    "oversampling": lambda: Subset(TABLE, [*range(60), 0, 0]),
    "a subset of a subset": lambda: Subset(Subset(TABLE, [3, 3, 4]), [0, 1]),
    "the same table twice": lambda: ConcatDataset([TABLE, TABLE]),
    "parts that overlap": lambda: ConcatDataset([Subset(TABLE, range(50)), Subset(TABLE, range(49, 90))]),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_record_that_is_several_rows_is_refused_unless_they_are_a_persons(name, tmp_path):
    data = Data(REPEATED[name]())
    with pytest.raises(ValueError, match="reads some rows several times"):
        train(tmp_path, data)
    assert not list(tmp_path.rglob("*.sqlite"))
    data.private_groups = torch.zeros(len(data.train), dtype=torch.int64)
    sizes = {"expected_batch_size": 1, "private_records": 2, "unit": "person"}
    assert train(tmp_path, data, **sizes).planned_steps == 2


def test_parts_of_one_table_that_do_not_overlap_are_records(tmp_path):
    parts = random_split(TABLE, [40, 50], torch.Generator().manual_seed(0))
    assert train(tmp_path, Data(ConcatDataset(parts))).guarantee == "unconditional"


@pytest.mark.parametrize(
    ("make", "reader"),
    [
        (Own, "Own"),
        (lambda: Subset(Own(), range(40)), "Own"),
        (lambda: DataLoader(TABLE, 10, collate_fn=lambda items: default_collate(items)), "<lambda>"),
    ],
)
def test_records_that_code_of_others_reads_are_a_condition_unless_it_is_declared(make, reader, tmp_path):
    example = tuple(part[0] for part in TABLE.tensors)
    callback = train(tmp_path / "a", Data(make()), example=example)
    assert callback.guarantee == "conditional"
    assert callback.privacy_summary()["reason"] == f"reading a record uses that record alone ({reader})"
    assert train(tmp_path / "b", Data(make()), reads_alone=True, example=example).guarantee == "unconditional"
    callback = train(tmp_path / "c", Data(make()), reads_alone=True)
    assert callback.guarantee == "conditional"
    assert callback.privacy_summary()["reason"] == "the structure of the first record is public"


def test_validating_or_testing_on_the_private_records_is_refused(tmp_path):
    for validation in (TABLE, Subset(TABLE, range(5)), TensorDataset(*(part[80:] for part in TABLE.tensors))):
        with pytest.raises(ValueError, match="val_dataloader: reads the data set of the private records"):
            train(tmp_path, Data(Subset(TABLE, range(40)), validation))
    assert not list(tmp_path.rglob("*.sqlite"))
    callback = train(tmp_path, Data(TABLE))
    with pytest.raises(ValueError, match="test_dataloader: reads the data set of the private records"):
        quiet_trainer(tmp_path, 1, callbacks=[callback]).test(Tested(), DataLoader(TABLE, 10))


class Tested(Lit):
    def test_step(self, batch, batch_idx):
        raise AssertionError("a private record was read")


class Again(ArraysDataModule):
    """Validates on private records, in one of several ways."""

    way = "load_private"

    def load_validation(self):
        if self.way == "load_private":
            return self.load_private()
        if self.way == "private":
            return self.private
        kept = super().load_private() if self.way == "super" else None
        return kept or LabeledImages(
            ChosenImages(self.records.store, torch.arange(5)), self.records.labels[:5], 2
        )

    def load_private(self):
        self.records = super().load_private()
        return self.records


@pytest.mark.parametrize("way", ["load_private", "private", "super", "rows"])
def test_a_validation_set_of_private_records_is_refused(way):
    data = make_data(Again)
    data.way = way
    with pytest.raises(
        (ValueError, RuntimeError), match=r"load_validation: returns private|private data isn't loaded"
    ):
        data.setup("fit")


class Items(Dataset):
    """Records of three easy classes that code of others reads."""

    def __init__(self):
        self.images, self.labels = easy_images(120)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.images[row], int(self.labels[row])


class Foreign(ArraysDataModule):
    def load_private(self):
        return Items()


class Declared(Foreign):
    reads_alone = True


@pytest.mark.parametrize(("kind", "level"), [(ArraysDataModule, "un"), (Foreign, ""), (Declared, "un")])
def test_labels_have_the_same_condition(kind, level, tmp_path):
    data = kind(*easy_images(120, 60, 30), num_classes=3, batch_size=16)
    teacher = PrivateKNN(5, 1.0, noise_source=default_noise())
    labeling = PrivateLabeler(
        teacher,
        queries_per_round=10,
        features=Pixels(),
        run_dir=tmp_path / "run",
        options={"progress": False},
    )
    quiet_trainer(tmp_path, callbacks=[labeling]).fit(small_student(), data)
    assert labeling.guarantee == f"{level}conditional"
    said = "reading a record uses that record alone (Items)"
    assert (said in json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]) == (level == "")


def test_a_labeler_of_others_is_a_condition():
    noted = [charge.guarantee.reason for charge in stated_plan(Honest(), 4, 4, 3)]
    assert noted == ["Honest moves by no more than it charges"]


class HuggingFace:
    """As ``datasets.Dataset``, which is not installed: an Arrow table and, of a selection, its indices."""

    def __init__(self, table, indices=None):
        self.data, self._indices = table, None if indices is None else pa.table({"indices": indices})

    def __len__(self):
        return len(self.data) if self._indices is None else len(self._indices)

    def __getitem__(self, row):
        place = row if self._indices is None else self._indices["indices"][row].as_py()
        return {
            name: column[place].as_py()
            for name, column in zip(self.data.column_names, self.data, strict=True)
        }

    def select(self, rows):
        return HuggingFace(self.data, list(rows))


def test_selections_of_arrow_tables_that_overlap_are_seen():
    table = pa.table({"x": [[0.1] * 4, [0.2] * 4, [0.3] * 4, [0.4] * 4], "y": [0, 1, 0, 1]})
    whole = HuggingFace(table)
    assert not has_repeated_rows(whole)
    assert has_repeated_rows(whole.select([0, 1, 1]))
    assert has_repeated_rows(ConcatDataset([whole.select([0, 1]), Subset(whole, [1, 2])]))
    assert has_repeated_rows(ConcatDataset([HuggingFace(table.slice(0, 2)), HuggingFace(table.slice(1, 2))]))
    assert not has_repeated_rows(ConcatDataset([HuggingFace(table.slice(0, 2)), whole.select([2, 3])]))
    parts = {
        "public": whole.select([2]),
        "num_classes": 2,
        "image_shape": (4,),
        "image": "x",
        "label": "y",
    }
    with pytest.raises(ValueError, match="public: shares records with the private set"):
        DatasetsDataModule(whole.select([1, 2]), **parts)
    DatasetsDataModule(whole.select([0, 1]), **parts)
