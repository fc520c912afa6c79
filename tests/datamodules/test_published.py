"""Published data sets: read from their own file formats, split, downloaded on request, refused when damaged."""

import functools
import gzip
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from pl_privknn.datamodules import (
    CelebADataModule,
    CIFAR10DataModule,
    DamagedFileError,
    FashionMNISTAttributesDataModule,
    FashionMNISTDataModule,
    Market1501DataModule,
    MNISTDataModule,
    SVHNDataModule,
    TensorImages,
)
from pl_privknn.datamodules.attribute_sets import CELEBA_ATTRIBUTES, MARKET_ATTRIBUTES
from pl_privknn.datamodules.datasets import ChosenImages, JoinedImages
from pl_privknn.datamodules.mnist import FASHION_ATTRIBUTES
from tests.datamodules.paper_data import (
    CELEBA_SMALL,
    CIFAR_SMALL,
    MARKET_SMALL,
    SVHN_SMALL,
    idx_bytes,
    published,
    sizes,
    write_papers,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    contents = write_papers(root)
    with published(root):
        yield root, contents


def loaded(kind, *where, stage="fit", **arguments):
    data = kind(*where, **arguments)
    data.setup(stage)
    return data


def as_bytes(images):
    return [image.tobytes() for image in (images * 255).round().to(torch.uint8).numpy()]


def labels_by_image(*contents):
    """Bytes of each image, channels last, -> its label."""
    rows = [row for images, labels in contents for row in zip(images, labels, strict=True)]
    return {np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes(): int(label) for image, label in rows}


def parts_of(data):
    return {
        "private": (data.private, data.private.labels),
        "public": (data.public, data.public.truth),
        "test": (data.test, data.test.labels),
    }


def assert_split(data, counts, known=None):
    """Parts of these sizes without a common image; and each image has the label that is known of it."""
    assert sizes(data) == counts
    parts = {name: as_bytes(part.images()) for name, (part, _) in parts_of(data).items()}
    assert len({image for images in parts.values() for image in images}) == sum(counts)
    for name, (_, labels) in parts_of(data).items() if known else ():
        assert [known[name][image] for image in parts[name]] == labels.tolist()


def file_of(part, row):
    """Name of the file that an image comes from."""
    return part.store.store.paths[part.store.rows[row]].name


def test_chosen_and_joined_images_read_what_they_are_made_of():
    images = torch.randint(0, 256, (7, 1, 2, 2), dtype=torch.uint8)
    first, second = TensorImages(images[:3]), TensorImages(images[3:])
    joined = JoinedImages([first, second])
    rows = torch.tensor([6, 0, 2, 3, 3])
    assert len(joined) == 7
    assert torch.equal(joined.read(rows), images[rows].float().div(255))
    chosen = ChosenImages(TensorImages(images), rows)
    assert (len(chosen), chosen.shape) == (5, (1, 2, 2))
    assert torch.equal(chosen.read(torch.tensor([4, 1])), images[[3, 0]].float().div(255))
    digests = chosen.digests(torch.arange(5))
    assert digests == joined.digests(rows)
    assert len(set(digests)) == 4
    with pytest.raises(ValueError, match="one shape"):
        JoinedImages([first, TensorImages(torch.zeros(1, 3, 2, 2))])


# ---------------------------------------------------------------------------- MNIST and its relatives

TRAIN, HELD_OUT = 20, 11
FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    made = {}
    for train, count in (("train", TRAIN), ("t10k", HELD_OUT)):
        made[f"{train}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        made[f"{train}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
    return made


def write_idx(folder, arrays, compressed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        data = idx_bytes(array)
        path = folder / f"{name}.gz" if compressed else folder / name
        path.write_bytes(gzip.compress(data) if compressed else data)


@pytest.mark.parametrize(("folder", "compressed"), [("MNIST/raw", False), (".", True)])
def test_mnist_split(tmp_path, arrays, folder, compressed):
    write_idx(tmp_path / folder, arrays, compressed)
    data = loaded(MNISTDataModule, tmp_path)
    assert (data.num_classes, data.image_shape) == (10, (1, 28, 28))
    assert sizes(data) == [20, 6, 5]
    torch.testing.assert_close(data.private.images(), torch.from_numpy(arrays[FILES[0]])[:, None] / 255)
    assert data.private.labels.tolist() == arrays[FILES[1]].tolist()
    # Public and test part are the halves of the test file, shuffled, each image with its own label.
    source = labels_by_image((arrays[FILES[2]][..., None], arrays[FILES[3]]))
    images = as_bytes(torch.cat([data.public.images(), data.test.images()]))
    labels = torch.cat([data.public.truth, data.test.labels]).tolist()
    assert dict(zip(images, labels, strict=True)) == source
    assert images[:6] != [image.tobytes() for image in arrays[FILES[2]][:6]]
    if not compressed:
        reference = datasets.MNIST(tmp_path, train=True)
        assert torch.equal((data.private.images()[:, 0] * 255).round().to(torch.uint8), reference.data)
        assert torch.equal(data.private.labels, reference.targets)


def test_fashion_mnist_falls_back_to_the_system_package(tmp_path, arrays, monkeypatch):
    system, root = tmp_path / "system", tmp_path / "root"
    monkeypatch.setattr(FashionMNISTDataModule, "system_folders", (system,))
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        loaded(FashionMNISTDataModule, root, stage="test")
    write_idx(system, arrays, compressed=True)
    data = loaded(FashionMNISTDataModule, root)
    assert len(data.private) == TRAIN
    assert data.class_names[9] == "Ankle boot"
    # Files of one's own come first, all or none: labels of another copy are never mixed in.
    write_idx(root / "FashionMNIST" / "raw", {name: array[:4] for name, array in arrays.items()})
    assert len(loaded(FashionMNISTDataModule, root).private) == 4
    (root / "FashionMNIST" / "raw" / FILES[1]).unlink()
    with pytest.raises(FileNotFoundError, match=FILES[1]):
        loaded(FashionMNISTDataModule, root)


def test_downloads_only_on_request(tmp_path, arrays, monkeypatch):
    asked = []

    def fake(name, root, **options):
        asked.append((name, root, options))
        if name == "MNIST":
            write_idx(root / "MNIST" / "raw", arrays)

    for name in ("MNIST", "SVHN", "CIFAR10"):
        monkeypatch.setattr(datasets, name, functools.partial(fake, name))
    for download in (False, True, True):
        MNISTDataModule(tmp_path, download=download).prepare_data()
    for download in (False, True):
        SVHNDataModule(tmp_path, extra=False, download=download).prepare_data()
        CIFAR10DataModule(tmp_path, download=download).prepare_data()
    assert asked == [
        ("MNIST", tmp_path, {"download": True}),  # and not again where the files are there
        ("SVHN", tmp_path / "SVHN", {"split": "train", "download": True}),
        ("SVHN", tmp_path / "SVHN", {"split": "test", "download": True}),
        ("CIFAR10", tmp_path, {"download": True}),
    ]
    assert len(loaded(MNISTDataModule, tmp_path).private) == TRAIN


IMAGES = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
_flips = np.random.default_rng(1).integers(10, 1000, 8)  # behind the gzip header, whose time stamp is free


def flipped(position):
    packed = bytearray(gzip.compress(np.random.default_rng(0).bytes(2000)))
    packed[position] ^= 0x10
    return bytes(packed)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "not an IDX file"),
        (idx_bytes(IMAGES, code=13), "not an IDX file"),
        (idx_bytes(IMAGES[0]), "not an IDX file of 3 dimensions"),
        (idx_bytes(IMAGES)[:9], "buffer is smaller"),
        (idx_bytes(IMAGES)[:-1], "cannot reshape array of size 1567"),
        (gzip.compress(idx_bytes(IMAGES))[:-20], "EOFError"),
        (gzip.compress(idx_bytes(IMAGES))[:12] + b"\xff" * 40, "no sound file"),
        *((flipped(int(position)), "BadGzipFile|zlib|EOFError") for position in _flips),
    ],
)
def test_damaged_idx_files_are_refused_by_name(tmp_path, data, words):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"t10k-images-idx3-ubyte: .*({words}).*download=True"):
        loaded(MNISTDataModule, tmp_path, stage="test")


# Written out once more by class, independently of the table by attribute.
OF_CLASSES = {
    "T-shirt/top": {"upper_body", "sleeves", "closed_front"},
    "Trouser": {"legs"},
    "Pullover": {"upper_body", "sleeves", "long_sleeves", "closed_front", "cold_weather"},
    "Dress": {"upper_body", "legs", "closed_front"},
    "Coat": {"upper_body", "sleeves", "long_sleeves", "button_front", "cold_weather"},
    "Sandal": {"footwear"},
    "Shirt": {"upper_body", "sleeves", "long_sleeves", "button_front"},
    "Sneaker": {"footwear", "closed_shoe"},
    "Bag": {"bag"},
    "Ankle boot": {"footwear", "closed_shoe", "cold_weather"},
}


def test_fashion_attributes_are_those_of_the_classes(tmp_path, arrays):
    write_idx(tmp_path, arrays)
    classes, data = (loaded(k, tmp_path) for k in (FashionMNISTDataModule, FashionMNISTAttributesDataModule))
    assert (data.task, data.num_classes, data.image_shape) == ("multilabel", 10, (1, 28, 28))
    assert data.attribute_names == tuple(FASHION_ATTRIBUTES)
    for name, row in zip(classes.class_names, data.table.tolist(), strict=True):
        assert {a for a, bit in zip(data.attribute_names, row, strict=True) if bit} == OF_CLASSES[name]
    shares = {
        words[0]: float(words[-1])
        for words in map(str.split, (FashionMNISTAttributesDataModule.__doc__ or "").splitlines())
        if words and words[0] in FASHION_ATTRIBUTES
    }
    assert shares == {name: row.count("1") / 10 for name, row in FASHION_ATTRIBUTES.items()}
    for (theirs, labels), (ours, attributes) in zip(
        parts_of(classes).values(), parts_of(data).values(), strict=True
    ):
        assert torch.equal(theirs.images(), ours.images())
        assert torch.equal(data.table[labels], attributes)
    assert data.private_groups is None


# ---------------------------------------------------------------------------- SVHN


def test_svhn_split(written):
    root, contents = written
    data = loaded(SVHNDataModule, root, **SVHN_SMALL)
    svhn = {file: labels_by_image(content) for file, content in contents["svhn"].items()}
    known = {"private": svhn["train"] | svhn["extra"], "public": svhn["test"], "test": svhn["test"]}
    assert_split(data, [90, 25, 10], known)
    # Pixels stay one byte a value.
    assert all(part._images.dtype == torch.uint8 for part in data.private.store.store.stores)
    without = loaded(SVHNDataModule, root, extra=False, private_records=20, **SVHN_SMALL)
    assert_split(without, [20, 25, 10], {**known, "private": svhn["train"]})
    everything = loaded(SVHNDataModule, root, **{**SVHN_SMALL, "test_examples": None}, stage="test")
    assert len(everything.test) == 25


# ---------------------------------------------------------------------------- CIFAR


@pytest.mark.parametrize(
    ("split", "counts", "parts"),
    [
        ("private_knn", CIFAR_SMALL, [30, 29, 10]),
        ("reverse_knn", {"public_examples": 30, "test_examples": 5}, [45, 30, 5]),
        ("train_test", {"public_examples": 15, "test_examples": 5}, [60, 15, 5]),
        ("pretraining", {}, [0, 60, 20]),
    ],
)
def test_cifar10_splits(written, split, counts, parts):
    root, contents = written
    data = loaded(CIFAR10DataModule, root, split=split, **counts)
    files = contents["cifar10"]
    assert_split(data, parts, dict.fromkeys(("private", "public", "test"), labels_by_image(*files.values())))
    in_test_file = set(labels_by_image(files["test_batch"]))
    public, test = set(as_bytes(data.public.images())), set(as_bytes(data.test.images()))
    if split != "private_knn":
        assert test <= in_test_file
        assert public <= in_test_file if split == "train_test" else not public & in_test_file
    other = loaded(CIFAR10DataModule, root, split=split, split_seed=1, stage="test", **counts)
    assert split == "pretraining" or not torch.equal(data.test.images(), other.test.images())


class _Harm:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_cifar_files_that_are_not_the_published_ones_are_never_unpickled(written, tmp_path, capsys):
    root, _ = written
    folder = tmp_path / "cifar-10-batches-py"
    shutil.copytree(root / "cifar-10-batches-py", folder)
    small = {"root": tmp_path, "stage": "test", **CIFAR_SMALL}
    with pytest.raises(ValueError, match="public_examples=61: there are 60 such images"):
        loaded(CIFAR10DataModule, **{**small, "public_examples": 61}, split="reverse_knn")
    whole = (folder / "data_batch_3").read_bytes()
    for content in (b"", whole[:-1], pickle.dumps({"data": _Harm()}, protocol=2)):
        (folder / "data_batch_3").write_bytes(content)
        with pytest.raises(FileNotFoundError, match=r"CIFAR10DataModule\(root=.*altered; pass download=True"):
            loaded(CIFAR10DataModule, **small)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------- CelebA


def test_celeba_split_and_attributes(written):
    root, contents = written
    names, values = contents["celeba"]
    assert len(CELEBA_ATTRIBUTES) == len(set(CELEBA_ATTRIBUTES)) == 40
    data = loaded(CelebADataModule, root, **CELEBA_SMALL)
    assert (data.task, data.num_classes, data.image_shape) == ("multilabel", 40, (3, 24, 24))
    assert data.attribute_names == CELEBA_ATTRIBUTES
    assert_split(data, [40, 20, 10])
    assert data.private.labels.tolist() == values[:40].tolist()
    assert data.private_groups.tolist() == [1000 + row % 10 for row in range(40)]
    # Every held-out image is one of the test partition, with its own attributes and decoded only when read.
    held_out = [file_of(part, row) for part in (data.public, data.test) for row in range(len(part))]
    assert sorted(held_out) == names[48:]
    rows = torch.cat([data.public.truth, data.test.labels])
    assert [values[names.index(name)].tolist() for name in held_out] == rows.tolist()
    image = Image.open(root / "celeba" / "img_align_celeba" / held_out[0]).resize((24, 24), Image.BILINEAR)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    torch.testing.assert_close(data.public.images([0])[0], expected)
    lazy = loaded(CelebADataModule, root, stage="test", **CELEBA_SMALL)
    assert not bool(lazy.test.store.store._cached.any())


# ---------------------------------------------------------------------------- Market-1501


def test_market_is_split_by_person(written):
    root, contents = written
    attributes = contents["market"]
    assert len(MARKET_ATTRIBUTES) == 30
    data = loaded(Market1501DataModule, root, **MARKET_SMALL)
    assert (data.task, data.num_classes, data.image_shape) == ("multilabel", 30, (3, 32, 32))
    assert_split(data, [8 * 4, 4 * 4, 6 * 4])
    people = {
        name: [int(file_of(part, row)[:4]) for row in range(len(part))]
        for name, (part, _) in parts_of(data).items()
    }
    assert not set(people["private"]) & set(people["public"])
    assert set(people["private"]) | set(people["public"]) == set(attributes["train"])
    assert data.private_groups.tolist() == people["private"]
    for name, (_, labels) in parts_of(data).items():
        known = attributes["test" if name == "test" else "train"]
        assert labels.tolist() == [known[person] for person in people[name]]
    # An age is one of four; the rest of the mapping is checked by hand here.
    ages = [list(MARKET_ATTRIBUTES).index(name) for name in ("young", "teenager", "adult", "old")]
    assert data.private.labels[:, ages].sum(dim=1).tolist() == [1] * 32
    assert MARKET_ATTRIBUTES["female"] == ("gender", 2)
    assert MARKET_ATTRIBUTES["up_red"] == ("upred", 2)
    assert Market1501DataModule(root).image_shape == (3, 128, 64)
    chosen = {"public_examples": 5, "test_examples": 3, "attributes": ["hat", "old"]}
    some = loaded(Market1501DataModule, root, **chosen, **MARKET_SMALL)
    assert sizes(some) == [32, 5, 3]
    assert some.private.labels.tolist() == data.private.labels[:, [5, 12]].tolist()


def test_market_damage_is_refused_by_name(written, tmp_path):
    root, _ = written
    said = "bounding_box_train: 48 images and 12 people in the table, expected"
    with pytest.raises(DamagedFileError, match=said):
        loaded(Market1501DataModule, root)
    folder = tmp_path / "Market-1501-v15.09.15"
    shutil.copytree(root / "Market-1501-v15.09.15", folder)
    data = {"root": tmp_path, **MARKET_SMALL}

    def refused(error, words, stage="fit", **changes):
        with pytest.raises(error, match=words) as caught:
            loaded(Market1501DataModule, **{**data, **changes}, stage=stage)
        return str(caught.value)

    refused(ValueError, "num_public_people=12: there are 12 people", num_public_people=12)
    refused(ValueError, "test_examples=25: there are 24 such", "test", test_examples=25)
    broken = next((folder / "bounding_box_train").glob("0002_*"))
    broken.write_bytes(b"\xff\xd8\xff")
    module = loaded(Market1501DataModule, **data)
    part = module.private if 2 in module.private_groups else module.public
    with pytest.raises(ValueError, match="is not a readable image") as caught:
        part.images()
    # The name of a private file tells who is on it.
    assert ("0002" in str(caught.value)) == (part is module.public)
    broken = broken.rename(broken.with_name("0999_c1s1_000451_03.jpg"))
    assert "0999" not in refused(DamagedFileError, r"market_attribute\.mat doesn't have all people")
    broken.rename(broken.with_name("portrait.jpg"))
    assert "portrait" not in refused(DamagedFileError, "aren't named as in 0002_c1s1")
    table = folder / "attribute" / "market_attribute.mat"
    table.write_bytes(table.read_bytes()[:2000])
    refused(DamagedFileError, r"market_attribute\.mat: no sound file", "test")
    savemat(table, {"market_attribute": {"train": {"age": [1]}, "test": {"age": [1]}}})
    refused(DamagedFileError, "no attribute 'image_index'", "test")
    table.unlink()
    refused(FileNotFoundError, r"missing in .*market_attribute\.mat, .*github\.com", "test")
    shutil.rmtree(folder / "bounding_box_test")
    refused(FileNotFoundError, r"missing in .*bounding_box_test", "test")
