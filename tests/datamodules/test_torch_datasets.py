"""DatasetsDataModule against the same data as arrays; its guarantee, its errors and its configurations."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from pl_privknn import PrivateLabeler, recommend
from pl_privknn.cli import main
from pl_privknn.config import ConfigurationError, build
from pl_privknn.datamodules import ArraysDataModule, DatasetsDataModule, EmbeddingsDataModule
from pl_privknn.features import Pixels
from pl_privknn.labelers import PrivateKNN
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.small_fit import easy_images, quiet_trainer, small_student

ARRAYS = easy_images(120, 60, 30)
SIDE = 4


class Items(Dataset):
    """Rows of a part of ARRAYS, read by code of others."""

    def __init__(self, part: int, fields: tuple[str, str] | None = None, vectors: bool = False):
        self.images, self.labels, self.fields = ARRAYS[2 * part], ARRAYS[2 * part + 1], fields
        if vectors:
            self.images = self.images.flatten(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        item = self.images[row], int(self.labels[row])
        return item if self.fields is None else dict(zip(self.fields, item, strict=True))


def tables():
    return [TensorDataset(*ARRAYS[start : start + 2]) for start in (0, 2, 4)]


def parts_of(data):
    data.setup()
    parts = [data.private, data.public, data.test]
    return [part.images() for part in parts] + [data.private.labels, data.public.truth, data.test.labels]


def labeled(folder, data, noise=None):
    labeling = PrivateLabeler(
        PrivateKNN(5, 1.0, **({} if noise is None else {"noise_source": noise})),
        queries_per_round=10, features=Pixels(), run_dir=folder, options={"progress": False},
    )  # fmt: skip
    quiet_trainer(folder, callbacks=[labeling]).fit(small_student(), data)
    return labeling, data.public.labels


FORMS = {
    "tables": tables,
    "lists": lambda: [list(zip(*ARRAYS[start : start + 2], strict=True)) for start in (0, 2, 4)],
    "items of others": lambda: [Items(part) for part in range(3)],
    "mappings": lambda: [Items(part, ("x", "y")) for part in range(3)],
    "triples": lambda: [[(*pair, "note") for pair in table] for table in tables()],
    "grey": lambda: [[(x[0].numpy(), y.numpy()) for x, y in table] for table in tables()],
}


@pytest.mark.parametrize("form", FORMS)
def test_parts_are_those_of_the_same_arrays(form):
    data = DatasetsDataModule(*FORMS[form](), num_classes=3, image="x", label="y")
    for ours, theirs in zip(parts_of(data), parts_of(ArraysDataModule(*ARRAYS, num_classes=3)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_releases_the_labels_of_the_same_arrays(tmp_path):
    ours = labeled(
        tmp_path / "a", DatasetsDataModule(*tables(), num_classes=3, batch_size=16), SeededNoise(3)
    )
    arrays = ArraysDataModule(*ARRAYS, num_classes=3, batch_size=16)
    theirs = labeled(tmp_path / "b", arrays, SeededNoise(3))
    assert torch.equal(ours[1], theirs[1])
    assert int((ours[1] >= 0).sum()) > 5


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_pillow_images_are_the_arrays_that_they_show(mode):
    pixels = np.random.default_rng(0).integers(0, 256, (12, SIDE, SIDE, 3), dtype=np.uint8)
    pixels = pixels[..., 0] if mode == "L" else pixels
    labels = np.arange(12) % 2
    items = [
        {"image": Image.fromarray(row), "label": label} for row, label in zip(pixels, labels, strict=True)
    ]
    ours = DatasetsDataModule(items[:6], items[6:9], items[9:], num_classes=2)
    cut = [slice(0, 6), slice(6, 9), slice(9, 12)]
    theirs = ArraysDataModule(*(of[rows] for rows in cut for of in (pixels, labels)), num_classes=2)
    assert all(map(torch.equal, parts_of(ours), parts_of(theirs)))


def test_vectors_are_embeddings():
    vectors, labels = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    cut = [slice(0, 10), slice(10, 20), slice(20, 30)]
    ours = DatasetsDataModule(*(TensorDataset(vectors[rows], labels[rows]) for rows in cut), num_classes=2)
    theirs = EmbeddingsDataModule(*(of[rows] for rows in cut for of in (vectors, labels)), num_classes=2)
    assert all(map(torch.equal, parts_of(ours), parts_of(theirs)))


def test_the_other_parts_and_options():
    whole = TensorDataset(ARRAYS[0], torch.stack([ARRAYS[1] % 2, ARRAYS[1] // 2], 1))
    rows = [Subset(whole, range(start, start + 20)) for start in range(0, 100, 20)]
    data = DatasetsDataModule(
        rows[0], list(ARRAYS[2]), validation=rows[2], predict=rows[3], num_classes=2, task="multilabel",
        private_groups=np.arange(20, dtype=np.int32) // 2, class_names=["odd", "two"],
    )  # fmt: skip
    data.setup()
    assert torch.equal(data.private.labels, whole.tensors[1][:20])
    assert data.private_groups.tolist() == [row // 2 for row in range(20)]
    assert (data.public.truth, len(data.test), data.attribute_names) == (None, 0, ("odd", "two"))
    assert torch.equal(torch.cat([x for x, _ in data.val_dataloader()]), whole.tensors[0][40:60])
    assert torch.equal(torch.cat(list(data.predict_dataloader())), whole.tensors[0][60:80])
    alone = DatasetsDataModule(rows[0], "none", num_classes=2, image_shape=(1, 8, 8), task="multilabel")
    alone.setup()
    assert (alone.has_public, len(alone.private)) == (False, 20)


class Mixed(Subset):
    """Each record is a mean of two."""

    def __getitem__(self, row):
        return (self.dataset[row][0] + self.dataset[(row + 1) % len(self)][0]) / 2, self.dataset[row][1]

    def __getitems__(self, rows):
        return [self[row] for row in rows]


class MixedList(list):
    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return (x + super().__getitem__(0)[0]) / 2, y


@pytest.mark.parametrize(
    ("make", "reader"),
    [
        (lambda: tables()[0], None),
        (lambda: ConcatDataset([Subset(tables()[0], range(60)), tables()[0]]), None),
        (lambda: Items(0), "Items"),
        (lambda: Subset(Items(0), range(90)), "Items"),
        (lambda: Mixed(tables()[0], range(120)), "Mixed"),
        (lambda: Subset(Mixed(tables()[0], range(120)), range(90)), "Mixed"),
        (lambda: MixedList(tables()[0]), "MixedList"),
    ],
)
def test_code_of_others_that_reads_records_is_a_condition_unless_it_is_declared(make, reader, tmp_path):
    def guarantee(**given):
        data = DatasetsDataModule(make(), *tables()[1:], num_classes=3, batch_size=16, **given)
        summary = labeled(tmp_path / str(given), data)[0].privacy_summary()
        return summary["guarantee"], summary["reason"]

    if reader is None:
        assert guarantee()[0] == "unconditional"
    else:
        assert guarantee() == ("conditional", f"reading a record uses that record alone ({reader})")
    if reader == "Items":
        assert guarantee(reads_alone=True)[0] == "unconditional"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(tables()[0])

    def __len__(self):
        return 3


class Noisy(Items):
    def __getitem__(self, row):
        image, label = super().__getitem__(row)
        return image * torch.rand(()), label


def changed(row, image=None, label=None):
    """The items of the private table, one of which differs."""
    items = list(tables()[0])
    x, y = items[row]
    items[row] = (x if image is None else image, y if label is None else label)
    return items


TABLE = TensorDataset(*ARRAYS[:2])
REFUSED = {
    "a stream": ({"private": Stream()}, "the private set is a Stream; want a map-style data set"),
    "no data set": ({"public": 3}, "the public set is a int; want a map-style data set"),
    "splits": ({"test": {"train": [], "test": []}}, "the test set is a dict; want a map-style"),
    "another shape": ({"private": changed(7, torch.rand(1, 9, 8))}, r"private set: an item's x .*shape \(1, 8, 8\)"),
    "a text": ({"private": changed(7, "cat.png")}, r"private set: an item's x .*shape \(1, 8, 8\)"),
    "values to 255": ({"public": TensorDataset(255 * ARRAYS[2])}, r"public set: an item's x .*float in \[0, 1\]"),
    "NaN": ({"private": changed(7, torch.full((1, 8, 8), torch.nan))}, "private set: an item's x"),
    "a label out of range": ({"private": changed(7, label=3)}, r"labels of the private set: some labels lie outside"),
    "a text as label": ({"private": changed(7, label="cat")}, r"private set has items that are no \(x, y\)"),
    "labels of two shapes": ({"private": changed(7, label=[0, 1])}, r"private set has items that are no \(x, y\)"),
    "no labels": ({"test": TensorDataset(ARRAYS[4])}, r"test set has items that are no \(x, y\)"),
    "no field of images": ({"private": Items(0, ("img", "label"))}, "private set: an item's x .'image' of mappings"),
    "no field of labels": ({"private": Items(0, ("image", "class"))}, "private set .* .'label' of mappings"),
    "random items": ({"private": Noisy(0)}, "private set: an item differs when read again"),
    "a row twice": ({"private": Subset(TABLE, [0, 1, 1])}, "private set reads some rows several times"),
    "a table twice": ({"private": ConcatDataset([TABLE, TABLE])}, "private set reads some rows several times"),
    "private records that are public": (
        {"private": Subset(TABLE, range(50)), "public": Subset(TABLE, range(49, 90))},
        "public: shares records with the private set",
    ),
    "private records in the test set": ({"private": TABLE, "test": TABLE}, "test: shares records"),
    "no shape": ({"public": "none", "test": None}, "image_shape=None"),
    "too few persons": ({"private_groups": [1, 2]}, "private_groups: expected int64, one number for each"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_do_not_fit_are_refused_in_one_line(name):
    given, message = REFUSED[name]
    parts = dict(zip(("private", "public", "test"), tables(), strict=True))
    with pytest.raises(ValueError, match=message) as error:
        DatasetsDataModule(**{**parts, "num_classes": 3, **given}).setup()
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------- configurations


def section(**given):
    items = [
        {"class_path": f"{__name__}.Items", "init_args": {"part": part, "vectors": True}} for part in range(3)
    ]
    parts = dict(zip(("private", "public", "test"), items, strict=True))
    return {"class_path": "DatasetsDataModule", "init_args": {**parts, "num_classes": 3, **given}}


def test_a_configuration_names_data_sets(tmp_path):
    theirs = DatasetsDataModule(*(Items(part, None, True) for part in range(3)), num_classes=3)
    assert all(map(torch.equal, parts_of(build({"data": section()}).data), parts_of(theirs)))
    assert not build({"data": section(public="none", image_shape=[64])}).data.has_public
    with pytest.raises(ConfigurationError, match=r"data\.init_args\.public"):
        build({"data": section(public="nothing")})


def test_recommend_takes_a_configuration_of_data(tmp_path):
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"data": section()}))
    theirs = recommend(build({"data": section()}).data, epsilon=1.0, private_records=120)
    found = recommend(tmp_path / "data.yaml", epsilon=1.0, private_records=120)
    assert (found.setting, found.reasons, found.expected) == (theirs.setting, theirs.reasons, theirs.expected)
    # What an object holds may be data, and is not written; a file names it.
    assert "data" not in theirs.config
    written = yaml.safe_load(found.to_yaml())["data"]
    assert all(map(torch.equal, parts_of(build({"data": written}).data), parts_of(found.data)))
    for wrong in ("model: 3", "data: 3", "data: {class_path: none.None}"):
        (tmp_path / "wrong.yaml").write_text(wrong)
        with pytest.raises(ValueError, match="want a section data, with the class_path of a data module"):
            recommend(tmp_path / "wrong.yaml", epsilon=1.0, private_records=120)
    with pytest.raises(ValueError, match=r"num_classes=3.*state them in the data module"):
        recommend(tmp_path / "data.yaml", epsilon=1.0, private_records=120, num_classes=3)
    with pytest.raises(ValueError, match="list is no PrivatePublicDataModule"):
        recommend([1, 2], epsilon=1.0, private_records=120)


def test_init_writes_the_configuration_of_data(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"data": section(name="Three shapes")}))
    words = ["--data", str(tmp_path / "own.yaml"), "--epsilon", "1", "--private-records", "120"]
    assert main(["init", *words, "--output", str(tmp_path / "run.yaml")]) == 0
    arguments = yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["init_args"]
    assert arguments["name"] == "Three shapes"
    assert arguments["private"] == section()["init_args"]["private"]
