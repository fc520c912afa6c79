"""Small data sets in the on-disk formats of the papers' ones."""

import contextlib
import hashlib
import pickle
import struct

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from pl_privknn.datamodules.attribute_sets import CELEBA_ATTRIBUTES, MARKET_ATTRIBUTES

SVHN_SMALL = {"public_examples": 25, "test_examples": 10}
CIFAR_SMALL = {"private_records": 30, "public_examples": 29, "test_examples": 10}
CELEBA_SMALL = {"public_examples": 20, "image_size": 24}
MARKET_SMALL = {"num_public_people": 4, "image_size": 32, "verify": False}
MARKET_FIELDS = [
    "age", "backpack", "bag", "handbag", "downblack", "downblue", "downbrown", "downgray", "downgreen", "downpink",
    "downpurple", "downwhite", "downyellow", "upblack", "upblue", "upgreen", "upgray", "uppurple", "upred", "upwhite",
    "upyellow", "clothes", "down", "up", "hair", "hat", "gender",
]  # fmt: skip


def pictures(rng, labels, size=32):
    """uint8 ``(n, size, size, 3)``: noise on a colour that tells the label."""
    colours = np.random.default_rng(9).integers(40, 200, (max(labels) + 1, 1, 1, 3))
    return (colours[labels] + rng.integers(-40, 41, (len(labels), size, size, 3))).astype(np.uint8)


def write_svhn(root, train=60, extra=30, test=50):
    """``X`` is (32, 32, 3, n), ``y`` is (n, 1) with 10 for the digit 0; compressed, as published."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    contents = {}
    for part, count in (("train", train), ("extra", extra), ("test", test)):
        labels = np.arange(count) % 10
        images = pictures(rng, labels)
        written = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        savemat(
            root / f"{part}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": written}, do_compression=True
        )
        contents[part] = (images, labels)
    return contents


def write_cifar10(root, each=12, test=20):
    """Five batches and a test batch, rows of 3 × 1024 values, red first."""
    rng = np.random.default_rng(1)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        count = test if name == "test_batch" else each
        labels = [int(label) for label in rng.permutation(count) % 10]
        images = pictures(rng, labels)
        rows = images.transpose(0, 3, 1, 2).reshape(count, -1)
        entry = {"batch_label": name, "labels": labels, "data": rows, "filenames": ["x.png"] * count}
        (folder / name).write_bytes(pickle.dumps(entry))
        contents[name] = (images, np.array(labels))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(n) for n in range(10)]}))
    return contents


def write_cifar100(root, train=200, test=120):
    """``train`` and ``test`` with fine and coarse labels."""
    rng = np.random.default_rng(2)
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        labels = [number % 100 for number in range(count)]
        rows = pictures(rng, labels).transpose(0, 3, 1, 2).reshape(count, -1)
        entry = {"fine_labels": labels, "coarse_labels": [label // 5 for label in labels], "data": rows}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(n) for n in range(100)]}))


def write_celeba(root, train=40, valid=8, test=30, people=10):
    """Lists as published (two header lines, padded columns) and images of 178×218."""
    rng = np.random.default_rng(3)
    folder = root / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True, exist_ok=True)
    count = train + valid + test
    names = [f"{number:06d}.jpg" for number in range(1, count + 1)]
    values = rng.integers(0, 2, (count, 40))
    for name, colour in zip(names, rng.integers(0, 256, (count, 3), dtype=np.uint8), strict=True):
        picture = np.broadcast_to(colour, (218, 178, 3)) // 2 + rng.integers(0, 100, (218, 178, 1), np.uint8)
        Image.fromarray(picture.astype(np.uint8)).save(folder / "img_align_celeba" / name)
    lines = [str(count), " ".join(CELEBA_ATTRIBUTES)]
    lines += [
        f"{name} " + " ".join(f"{2 * v - 1:2d}" for v in row) for name, row in zip(names, values, strict=True)
    ]
    (folder / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    partitions = [0] * train + [1] * valid + [2] * test
    (folder / "list_eval_partition.txt").write_text(
        "".join(f"{n} {p}\n" for n, p in zip(names, partitions, strict=True))
    )
    (folder / "identity_CelebA.txt").write_text(
        "".join(f"{name} {1000 + row % people}\n" for row, name in enumerate(names))
    )
    for file, columns in (("list_bbox_celeba.txt", 4), ("list_landmarks_align_celeba.txt", 10)):
        lines = [
            str(count),
            " ".join("abcdefghij"[:columns]),
            *(f"{name} " + "1 " * columns for name in names),
        ]
        (folder / file).write_text("\n".join(line.strip() for line in lines) + "\n")
    return names, values


def write_market(root, people=12, tested=6, each=4):
    """Folders of 64×128 images, and the nested structure of market_attribute.mat (persons on the images alone)."""
    rng = np.random.default_rng(4)
    folder = root / "Market-1501-v15.09.15"
    ids = {"train": [2 + 5 * i for i in range(people)], "test": [1 + 5 * i for i in range(tested)]}
    structure, attributes = {}, {}
    for part, persons in ids.items():
        (folder / f"bounding_box_{part}").mkdir(parents=True, exist_ok=True)
        names = [f"{person:04d}" for person in persons]
        if part == "test":
            names += ["0000", "-1"]  # detections of nobody
        for name in names:
            for box in range(each):
                file = (
                    folder / f"bounding_box_{part}" / f"{name}_c{box % 6 + 1}s1_{451 + box:06d}_{box:02d}.jpg"
                )
                Image.fromarray(rng.integers(0, 256, (128, 64, 3), dtype=np.uint8)).save(file)
        fields = {field: rng.integers(1, 3, (1, len(persons)), dtype=np.uint8) for field in MARKET_FIELDS}
        fields["age"] = rng.integers(1, 5, (1, len(persons)), dtype=np.uint8)
        attributes[part] = {
            person: [int(fields[field][0, i] == value) for field, value in MARKET_ATTRIBUTES.values()]
            for i, person in enumerate(persons)
        }
        index = np.empty((1, len(persons)), dtype=object)
        index[0] = [f"{person:04d}" for person in persons]
        structure[part] = {**fields, "image_index": index}
    (folder / "attribute").mkdir(exist_ok=True)
    savemat(folder / "attribute" / "market_attribute.mat", {"market_attribute": structure})
    (folder / "bounding_box_test" / "Thumbs.db").write_bytes(b"x")
    return attributes


def idx_bytes(array, code=8):
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(root, train=80, test=60, name="MNIST"):
    """IDX files."""
    rng = np.random.default_rng(5)
    folder = root / name / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = pictures(rng, labels, 28)[..., 0]
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{kind}-ubyte").write_bytes(idx_bytes(array))


def write_embeddings(folder, num_classes, dimension=16, private=80, public=60, test=20):
    """One ``.npy`` file for each argument of EmbeddingsDataModule."""
    rng = np.random.default_rng(6)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("private", private), ("public", public), ("test", test)):
        labels = np.arange(count) % num_classes
        vectors = np.eye(dimension)[labels] + 0.1 * rng.normal(size=(count, dimension))
        np.save(folder / f"{part}_embeddings.npy", vectors.astype(np.float32))
        np.save(folder / f"{part}_{'truth' if part == 'public' else 'labels'}.npy", labels)


def write_papers(root):
    """All data sets; what each was made of."""
    contents = {
        "svhn": write_svhn(root / "SVHN"),
        "cifar10": write_cifar10(root),
        "celeba": write_celeba(root),
        "market": write_market(root),
    }
    write_cifar100(root)
    return contents


def sizes(data):
    return [len(part) for part in (data.private, data.public, data.test)]


@contextlib.contextmanager
def published(root):
    """torchvision takes the small files under ``root`` for the published ones, by their checksums."""

    def md5(path):
        return hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else ""

    with pytest.MonkeyPatch.context() as patch:
        splits = {
            part: ["", f"{part}_32x32.mat", md5(root / "SVHN" / f"{part}_32x32.mat")]
            for part in ("train", "extra", "test")
        }
        patch.setattr(datasets.SVHN, "split_list", splits)
        for kind in (datasets.CIFAR10, datasets.CIFAR100):
            for files in ("train_list", "test_list"):
                found = [[name, md5(root / kind.base_folder / name)] for name, _ in getattr(kind, files)]
                patch.setattr(kind, files, found)
            meta = kind.meta["filename"]
            patch.setattr(kind, "meta", {**kind.meta, "md5": md5(root / kind.base_folder / meta)})
        lists = [(number, md5(root / "celeba" / name), name) for number, _, name in datasets.CelebA.file_list]
        patch.setattr(datasets.CelebA, "file_list", lists)
        yield
