"""SVHN, CIFAR, CelebA and Market-1501: read from their own file formats, split, refused when damaged, labelled."""

import hashlib
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import yaml
from paper_data import (
    write_celeba,
    write_cifar10,
    write_cifar100,
    write_market,
    write_svhn,
)
from PIL import Image
from scipy.io import savemat

from pl_privknn.cli import main
from pl_privknn.datamodules import (
    CelebADataModule,
    CIFAR10DataModule,
    CIFAR100DataModule,
    DamagedFileError,
    Market1501DataModule,
    SVHNDataModule,
    TensorImages,
)
from pl_privknn.datamodules.celeba import CELEBA_ATTRIBUTES
from pl_privknn.datamodules.market1501 import MARKET_ATTRIBUTES
from pl_privknn.datamodules.published import read_array_pickle
from pl_privknn.datamodules.stores import ChosenImages, JoinedImages

SVHN_SMALL = {"num_public": 25, "num_test": 10, "verify": False}
CIFAR_SMALL = {"num_private": 30, "num_public": 29, "num_test": 10, "verify": False}
CELEBA_SMALL = {"num_public": 20, "image_size": 24, "verify": False}
MARKET_SMALL = {"num_public_people": 4, "image_size": 32, "verify": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    contents = {
        "svhn": write_svhn(root),
        "cifar10": write_cifar10(root),
        "celeba": write_celeba(root),
        "market": write_market(root),
    }
    write_cifar100(root)
    return root, contents


def as_bytes(images):
    return [image.tobytes() for image in (images * 255).round().to(torch.uint8).numpy()]


def sizes(data):
    return [len(part) for part in (data.private, data.public, data.test)]


def disjoint(data):
    parts = [as_bytes(part.images()) for part in (data.private, data.public, data.test)]
    everything = [image for part in parts for image in part]
    return len(set(everything)) == len(everything)


def source(images, labels):
    """Bytes of each image -> its label."""
    return {
        np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes(): int(label)
        for image, label in zip(images, labels, strict=True)
    }


def assert_labels_stay_with_images(part, labels, known):
    for image, label in zip(as_bytes(part.images()), labels.tolist(), strict=True):
        assert known[image] == label


# ---------------------------------------------------------------------------- stores


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
    assert chosen.digests() == [joined.digests()[row] for row in rows.tolist()]
    assert len(set(chosen.digests())) == 4
    with pytest.raises(ValueError, match="one shape"):
        JoinedImages([first, TensorImages(torch.zeros(1, 3, 2, 2))])


# ---------------------------------------------------------------------------- SVHN


def test_svhn_split(written):
    root, contents = written
    data = SVHNDataModule(root, **SVHN_SMALL)
    data.setup("fit")
    assert sizes(data) == [90, 25, 10]
    assert disjoint(data)
    for part, labels, files in (
        (data.private, data.private.labels, ("train", "extra")),
        (data.public, data.public.truth, ("test",)),
        (data.test, data.test.labels, ("test",)),
    ):
        known = {key: label for file in files for key, label in source(*contents["svhn"][file]).items()}
        assert_labels_stay_with_images(part, labels, known)
    # Pixels stay one byte a value.
    assert all(store._images.dtype == torch.uint8 for store in data.private.store.stores)
    without = SVHNDataModule(root, extra=False, num_private=20, **SVHN_SMALL)
    without.setup("fit")
    assert sizes(without) == [20, 25, 10]
    assert set(as_bytes(without.private.images())) <= set(source(*contents["svhn"]["train"]))
    everything = SVHNDataModule(root, **{**SVHN_SMALL, "num_test": None})
    everything.setup("test")
    assert len(everything.test) == 25


def test_svhn_reads_what_torchvision_reads(written, monkeypatch):
    from torchvision.datasets import SVHN

    root, _ = written
    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    reference = SVHN(root, split="train")
    data = SVHNDataModule(root, extra=False, **SVHN_SMALL)
    data.setup("fit")
    assert torch.equal((data.private.images() * 255).round().byte(), torch.from_numpy(reference.data))
    assert data.private.labels.tolist() == reference.labels.tolist()


def test_svhn_defaults_are_the_papers_and_ask_for_the_published_files(written):
    root, _ = written
    data = SVHNDataModule(root)
    assert (data.num_public, data.num_test, data.extra) == (25_000, 1_000, True)
    with pytest.raises(DamagedFileError, match=r"train_32x32\.mat: \d+ bytes whose MD5 isn't"):
        data.setup("fit")
    with pytest.raises(ValueError, match="num_public=25000, num_test=1000: the test file has 50 images"):
        SVHNDataModule(root, verify=False).setup("test")
    with pytest.raises(FileNotFoundError, match=r"train_32x32\.mat not found in .*download=True"):
        SVHNDataModule(root / "nowhere").setup("fit")


def test_svhn_with_the_right_checksum_is_accepted(written, monkeypatch):
    from torchvision.datasets import SVHN

    root, _ = written
    sums = {
        part: ["", "", hashlib.md5((root / f"{part}_32x32.mat").read_bytes()).hexdigest()]
        for part in ("train", "extra", "test")
    }
    monkeypatch.setattr(SVHN, "split_list", sums)
    data = SVHNDataModule(root, num_public=25, num_test=10)
    data.setup("fit")
    assert sizes(data) == [90, 25, 10]


@pytest.mark.parametrize("kept", [0, 60, 1000, -3])
def test_svhn_cut_off_is_refused_by_name(written, tmp_path, kept):
    root, _ = written
    whole = (root / "test_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(whole[:kept])
    with pytest.raises(DamagedFileError, match=r"test_32x32\.mat: no sound MATLAB file .* bytes long"):
        SVHNDataModule(tmp_path, **SVHN_SMALL).setup("test")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, "no variable 'y'"),
        ({"X": np.zeros((32, 30, 3, 4), np.uint8), "y": np.ones(4)}, "format 2"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones(3)}, "3 entries for 4 images"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.zeros(4)}, "one of 1 … 10"),
    ],
)
def test_svhn_other_contents_are_refused_by_name(tmp_path, variables, message):
    savemat(tmp_path / "test_32x32.mat", variables)
    with pytest.raises(DamagedFileError, match=message):
        SVHNDataModule(tmp_path, **SVHN_SMALL).setup("test")


# ---------------------------------------------------------------------------- CIFAR


@pytest.mark.parametrize(
    ("split", "counts", "parts"),
    [
        ("private_knn", CIFAR_SMALL, [30, 29, 10]),
        ("reverse_knn", {"num_public": 30, "num_test": 5, "verify": False}, [45, 30, 5]),
        ("train_test", {"num_public": 15, "num_test": 5, "verify": False}, [60, 15, 5]),
        ("pretraining", {"verify": False}, [0, 60, 20]),
    ],
)
def test_cifar10_splits(written, split, counts, parts):
    root, contents = written
    data = CIFAR10DataModule(root, split=split, **counts)
    data.setup("fit")
    assert sizes(data) == parts
    assert disjoint(data)
    files = {name: source(*content) for name, content in contents["cifar10"].items()}
    known = {key: label for labels in files.values() for key, label in labels.items()}
    assert_labels_stay_with_images(data.private, data.private.labels, known)
    assert_labels_stay_with_images(data.public, data.public.truth, known)
    assert_labels_stay_with_images(data.test, data.test.labels, known)
    in_test_file = set(files["test_batch"])
    public, test = set(as_bytes(data.public.images())), set(as_bytes(data.test.images()))
    if split == "reverse_knn":
        assert not public & in_test_file
        assert test <= in_test_file
    if split in ("train_test", "pretraining"):
        assert test <= in_test_file
        assert public <= in_test_file if split == "train_test" else not public & in_test_file


def test_cifar10_split_is_fixed_and_seeded(written):
    root, _ = written
    first, again, other = (CIFAR10DataModule(root, split_seed=seed, **CIFAR_SMALL) for seed in (0, 0, 1))
    first.setup("fit")
    again.setup("test")
    other.setup("test")
    assert torch.equal(first.test.images(), again.test.images())
    assert not torch.equal(first.test.images(), other.test.images())


@pytest.mark.parametrize(
    ("split", "published"),
    [
        ("private_knn", (30_000, 29_000, 1_000)),
        ("reverse_knn", (29_000, 30_000, 1_000)),
        ("train_test", (50_000, 9_000, 1_000)),
        ("pretraining", (0, 50_000, 10_000)),
    ],
)
def test_cifar10_default_sizes_are_the_papers(split, published):
    parts = CIFAR10DataModule(split=split)._parts(50_000, 10_000)
    assert tuple(len(parts[name]) for name in ("private", "public", "test")) == published
    rows = torch.cat(list(parts.values()))
    assert len(rows.unique()) == len(rows)


def test_cifar_reads_what_torchvision_reads(written, monkeypatch):
    from torchvision.datasets import CIFAR10

    root, _ = written
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    reference = CIFAR10(root, train=False)
    data = CIFAR10DataModule(root, split="pretraining", num_test=20, verify=False)
    data.setup("test")
    assert sorted(as_bytes(data.test.images())) == sorted(
        np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes() for image in reference.data
    )


def test_cifar100_is_a_public_first_stage(written):
    root, _ = written
    data = CIFAR100DataModule(root, verify=False, train_on_truth=True)
    data.setup("fit")
    assert sizes(data) == [0, 200, 120]
    assert data.num_classes == 100
    assert torch.equal(data.public.labels, data.public.truth)
    guided = CIFAR100DataModule(root, split="train_test", num_public=90, num_test=10, verify=False)
    guided.setup("fit")
    assert sizes(guided) == [200, 90, 10]


def test_cifar_damage_is_refused_by_name(written, tmp_path):
    root, _ = written
    with pytest.raises(DamagedFileError, match=r"data_batch_1: \d+ bytes whose MD5 isn't .*verify=False"):
        CIFAR10DataModule(root).setup("test")
    folder = tmp_path / "cifar-10-batches-py"
    shutil.copytree(root / "cifar-10-batches-py", folder)
    small = {"root": tmp_path, **CIFAR_SMALL}
    with pytest.raises(ValueError, match="num_public=61: split='reverse_knn' takes 61 images where 60"):
        CIFAR10DataModule(**{**small, "num_public": 61}, split="reverse_knn").setup("test")
    whole = (folder / "data_batch_3").read_bytes()
    for kept in (0, 7, 5000, -1):
        (folder / "data_batch_3").write_bytes(whole[:kept])
        with pytest.raises(DamagedFileError, match="data_batch_3: no sound pickle"):
            CIFAR10DataModule(**small).setup("test")
    for entry, message in (
        ({"data": np.zeros((4, 3071), np.uint8), "labels": [0] * 4}, "'data' is no uint8"),
        ({"data": np.zeros((4, 3072), np.uint8), "labels": [0] * 3}, "4 labels"),
        ({"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 10]}, "0 … 9"),
        ([1, 2], "list instead of a dictionary"),
    ):
        (folder / "data_batch_3").write_bytes(pickle.dumps(entry, protocol=2))
        with pytest.raises(DamagedFileError, match=f"data_batch_3: .*{message}"):
            CIFAR10DataModule(**small).setup("test")
    (folder / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3 not found in .*download=True"):
        CIFAR10DataModule(**small).setup("test")


class _Harm:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def test_a_pickle_can_not_run_code(tmp_path, capsys):
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": _Harm()}, protocol=2))
    with pytest.raises(DamagedFileError, match=r"print has no place in a file of arrays"):
        read_array_pickle(tmp_path / "batch")
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------- CelebA


def test_celeba_split_and_attributes(written):
    root, contents = written
    names, values = contents["celeba"]
    assert len(CELEBA_ATTRIBUTES) == len(set(CELEBA_ATTRIBUTES)) == 40
    data = CelebADataModule(root, **CELEBA_SMALL)
    assert (data.task, data.num_classes, data.image_shape) == ("multilabel", 40, (3, 24, 24))
    assert data.attribute_names == CELEBA_ATTRIBUTES
    data.setup("fit")
    assert sizes(data) == [40, 20, 10]
    assert disjoint(data)
    assert data.private.labels.tolist() == values[:40].tolist()
    assert data.private_groups.tolist() == [1000 + row % 10 for row in range(40)]
    # Every held-out image is one of the test partition, with its own attributes and decoded only when read.
    held_out = [path.name for part in (data.public, data.test) for path in part.store._paths]
    assert sorted(held_out) == names[48:]
    rows = torch.cat([data.public.truth, data.test.labels])
    assert [values[names.index(name)].tolist() for name in held_out] == rows.tolist()
    image = Image.open(root / "celeba" / "img_align_celeba" / held_out[0]).resize((24, 24), Image.BILINEAR)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    torch.testing.assert_close(data.public.images([0])[0], expected)
    lazy = CelebADataModule(root, **CELEBA_SMALL)
    lazy.setup("test")
    assert not bool(lazy.test.store._cached.any())


def test_celeba_options(written, tmp_path):
    root, contents = written
    _, values = contents["celeba"]
    two = CelebADataModule(
        root,
        attributes=["Smiling", "Bald"],
        num_private=15,
        num_test=7,
        include_validation=True,
        **CELEBA_SMALL,
    )
    two.setup("fit")
    assert sizes(two) == [15, 20, 7]
    assert two.private_groups.shape == (15,)
    rows = [int(path.stem) - 1 for path in two.private.store._paths]
    assert two.private.labels.tolist() == values[rows][:, [31, 4]].tolist()
    with pytest.raises(ValueError, match="'Grumpy' is not one of"):
        CelebADataModule(root, attributes=["Grumpy", "Bald"])
    with pytest.raises(ValueError, match="num_public=30, num_test=None: there are 30 images"):
        CelebADataModule(root, num_public=30, verify=False).setup("test")
    shutil.copytree(root / "celeba", tmp_path / "celeba")
    (tmp_path / "celeba" / "identity_CelebA.txt").unlink()
    nobody = CelebADataModule(tmp_path, **CELEBA_SMALL)
    nobody.setup("fit")
    assert nobody.private_groups is None


def test_celeba_damage_is_refused_by_name(written, tmp_path):
    root, _ = written
    with pytest.raises(DamagedFileError, match=r"list_attr_celeba\.txt: \d+ bytes whose MD5"):
        CelebADataModule(root).setup("fit")
    folder = tmp_path / "celeba"
    shutil.copytree(root / "celeba", folder)
    data = {"root": tmp_path, **CELEBA_SMALL}

    def damaged(name, change, message, error=DamagedFileError):
        before = (folder / name).read_text()
        (folder / name).write_text(change(before))
        with pytest.raises(error, match=message):
            CelebADataModule(**data).setup("fit")
        (folder / name).write_text(before)

    damaged(
        "list_attr_celeba.txt",
        lambda text: text[:-30],
        r"line 78 of its table has \d+ values; want a name and 40",
    )
    damaged(
        "list_attr_celeba.txt",
        lambda text: text[: text.index("000060")],
        "announces '78' images and 59 lines",
    )
    damaged(
        "list_attr_celeba.txt", lambda text: text.replace("Bald", "Bold"), "doesn't name the 40 attributes"
    )
    damaged("list_attr_celeba.txt", lambda text: text.replace(" 1", " 3"), "neither -1 nor 1")
    damaged(
        "list_eval_partition.txt",
        lambda text: text[: text.index("000060")],
        r"list_eval_partition\.txt: it lists 59 images",
    )
    picture = folder / "img_align_celeba" / "000003.jpg"
    picture.write_bytes(picture.read_bytes()[:300])
    cut_off = CelebADataModule(**data)
    cut_off.setup("fit")
    with pytest.raises(ValueError, match=r"000003\.jpg is not a readable image"):
        cut_off.private.images()
    picture.unlink()
    with pytest.raises(FileNotFoundError, match=r"img_align_celeba: 1 of the 78 images .* 000003\.jpg"):
        CelebADataModule(**data).setup("fit")
    shutil.rmtree(folder / "img_align_celeba")
    with pytest.raises(FileNotFoundError, match=r"no folder img_align_celeba .*img_align_celeba\.zip"):
        CelebADataModule(**data).setup("fit")
    (folder / "list_eval_partition.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"list_eval_partition\.txt not found"):
        CelebADataModule(**data).setup("fit")


# ---------------------------------------------------------------------------- Market-1501


def test_market_is_split_by_person(written):
    root, contents = written
    attributes = contents["market"]
    assert len(MARKET_ATTRIBUTES) == 30
    data = Market1501DataModule(root, **MARKET_SMALL)
    assert (data.task, data.num_classes, data.image_shape) == ("multilabel", 30, (3, 32, 32))
    data.setup("fit")
    assert sizes(data) == [8 * 4, 4 * 4, 6 * 4]
    assert disjoint(data)
    people = {
        name: [int(path.name[:4]) for path in part.store._paths]
        for name, part in (("private", data.private), ("public", data.public), ("test", data.test))
    }
    assert not set(people["private"]) & set(people["public"])
    assert set(people["private"]) | set(people["public"]) == set(attributes["train"])
    assert data.private_groups.tolist() == people["private"]
    assert data.private.labels.tolist() == [attributes["train"][person] for person in people["private"]]
    assert data.public.truth.tolist() == [attributes["train"][person] for person in people["public"]]
    assert data.test.labels.tolist() == [attributes["test"][person] for person in people["test"]]
    # An age is one of four; the rest of the mapping is checked by hand here.
    ages = [list(MARKET_ATTRIBUTES).index(name) for name in ("young", "teenager", "adult", "old")]
    assert data.private.labels[:, ages].sum(dim=1).tolist() == [1] * 32
    assert MARKET_ATTRIBUTES["female"] == ("gender", 2)
    assert MARKET_ATTRIBUTES["up_red"] == ("upred", 2)
    assert Market1501DataModule(root).image_shape == (3, 128, 64)
    some = Market1501DataModule(root, num_public=5, num_test=3, attributes=["hat", "old"], **MARKET_SMALL)
    some.setup("fit")
    assert sizes(some) == [32, 5, 3]
    assert some.private.labels.tolist() == data.private.labels[:, [5, 12]].tolist()


def test_market_damage_is_refused_by_name(written, tmp_path):
    root, _ = written
    with pytest.raises(DamagedFileError, match="bounding_box_train: 48 images, want 12936"):
        Market1501DataModule(root).setup("fit")
    folder = tmp_path / "Market-1501-v15.09.15"
    shutil.copytree(root / "Market-1501-v15.09.15", folder)
    data = {"root": tmp_path, **MARKET_SMALL}
    with pytest.raises(ValueError, match="num_public_people=12: there are 12 people"):
        Market1501DataModule(**{**data, "num_public_people": 12}).setup("fit")
    with pytest.raises(ValueError, match="num_test=25: there are 24"):
        Market1501DataModule(**data, num_test=25).setup("test")
    broken = next((folder / "bounding_box_train").glob("0002_*"))
    broken.write_bytes(b"\xff\xd8\xff")
    module = Market1501DataModule(**data)
    module.setup("fit")
    part = module.private if 2 in module.private_groups else module.public
    with pytest.raises(ValueError, match="is not a readable image") as caught:
        part.images()
    # The name of a private file tells who is on it.
    assert ("0002" in str(caught.value)) == (part is module.public)
    broken.rename(broken.with_name("0999_c1s1_000451_03.jpg"))
    with pytest.raises(
        DamagedFileError, match=r"market_attribute\.mat: it doesn't have all people"
    ) as caught:
        Market1501DataModule(**data).setup("fit")
    assert "0999" not in str(caught.value)
    (folder / "bounding_box_train" / "0999_c1s1_000451_03.jpg").rename(
        folder / "bounding_box_train" / "portrait.jpg"
    )
    with pytest.raises(DamagedFileError, match="aren't named as in 0002_c1s1") as caught:
        Market1501DataModule(**data).setup("fit")
    assert "portrait" not in str(caught.value)
    table = folder / "attribute" / "market_attribute.mat"
    table.write_bytes(table.read_bytes()[:2000])
    with pytest.raises(DamagedFileError, match=r"market_attribute\.mat: no sound MATLAB file"):
        Market1501DataModule(**data).setup("test")
    savemat(table, {"market_attribute": {"train": {"age": [1]}, "test": {"age": [1]}}})
    with pytest.raises(DamagedFileError, match=r"market_attribute\.train has no field 'image_index'"):
        Market1501DataModule(**data).setup("test")
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"market_attribute\.mat not found .*github\.com"):
        Market1501DataModule(**data).setup("test")
    shutil.rmtree(folder / "bounding_box_test")
    with pytest.raises(FileNotFoundError, match="no folder bounding_box_test"):
        Market1501DataModule(**data).setup("test")


# ---------------------------------------------------------------------------- the command line


def gaussian(sigma):
    return {"class_path": "Gaussian", "init_args": {"sigma": sigma}}


CLASSES = {
    "class_path": "PrivateKNN", "init_args": {"k": 5, "sampling_rate": 0.8, "noise": gaussian(1.0)}
}  # fmt: skip
ATTRIBUTES = {
    "class_path": "MultiLabelKNN", "init_args": {"k": 5, "sampling_rate": 0.8, "tau": 10, "noise": gaussian(2.0)}
}  # fmt: skip
BY_PERSON = {
    "class_path": "MultiLabelPATE",
    "init_args": {
        "num_teachers": 4, "tau": 10, "groups": "data", "progress": False,
        "teachers": {"class_path": "LinearAttributeTeachers", "init_args": {"steps": 5}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "arguments", "labeler"),
    [
        ("SVHNDataModule", SVHN_SMALL, CLASSES),
        ("CIFAR10DataModule", CIFAR_SMALL, CLASSES),
        ("CelebADataModule", CELEBA_SMALL, ATTRIBUTES),
        ("Market1501DataModule", MARKET_SMALL, ATTRIBUTES),
        ("Market1501DataModule", MARKET_SMALL, BY_PERSON),
    ],
    ids=["svhn", "cifar10", "celeba", "market", "market_by_person"],
)
def test_a_round_from_the_command_line(written, tmp_path, monkeypatch, data, arguments, labeler):
    root, _ = written
    monkeypatch.chdir(tmp_path)
    config = {
        "seed_everything": 0,
        "data": {"class_path": data, "init_args": {"root": str(root), "batch_size": 8, **arguments}},
        "model": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
        "labeling": {
            "labeler": labeler, "rounds": 1, "queries_per_round": 12, "delta": 1e-3, "progress": False,
            "features": {"class_path": "HOG"},
        },
        "trainer": {
            "max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
            "log_every_n_steps": 1,
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml", "--run_dir", "run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon"] > 0
    assert summary["queried"] == 12
    assert summary["answered"] == 12
    assert 0 <= summary["test_accuracy"] <= 1


def test_features_of_a_first_stage_on_public_data(written, tmp_path, monkeypatch):
    from pl_privknn.features import CheckpointFeatures
    from pl_privknn.students import SupervisedStudent

    root, _ = written
    monkeypatch.chdir(tmp_path)
    config = {
        "data": {
            "class_path": "CIFAR100DataModule",
            "init_args": {"root": str(root), "verify": False, "train_on_truth": True, "num_test": 20},
        },
        "model": {
            "class_path": "SupervisedStudent",
            "init_args": {"network": "cifar_cnn", "ema_decay": 0.9, "mean": [0.5] * 3, "std": [0.2] * 3},
        },
        "trainer": {
            "max_epochs": 1, "limit_train_batches": 2, "accelerator": "cpu", "enable_progress_bar": False,
            "enable_model_summary": False, "log_every_n_steps": 1,
        },
    }  # fmt: skip
    (tmp_path / "stage.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "stage.yaml", "--run_dir", "stage"]) == 0
    checkpoint = tmp_path / "stage" / "checkpoints" / "last.ckpt"
    images = torch.rand(5, 3, 32, 32)
    student = SupervisedStudent.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    with torch.no_grad():
        expected = student.features(images)
    found = CheckpointFeatures(checkpoint, batch_size=2)(images)
    torch.testing.assert_close(found, expected)
    unit = CheckpointFeatures(checkpoint, normalize=True)(images)
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(5))
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        CheckpointFeatures(tmp_path / "none.ckpt")(images)
    torch.save({"state_dict": {}}, tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match="is no checkpoint of a student"):
        CheckpointFeatures(tmp_path / "bad.ckpt")(images)


def test_embeddings_are_made_as_the_documentation_says(written, tmp_path, monkeypatch):
    from pathlib import Path

    import timm

    from pl_privknn.datamodules import EmbeddingsDataModule

    root, _ = written
    page = (Path(__file__).resolve().parents[1] / "docs" / "datasets.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "vit.safetensors.pth")
    shutil.copytree(root / "cifar-10-batches-py", tmp_path / "data" / "cifar-10-batches-py")
    for old, new in (
        ("vit_base_patch16_224.augreg_in21k", "test_vit"),
        ("vit.safetensors", "vit.safetensors.pth"),
        ('split="train_test"', 'split="train_test", num_public=15, num_test=5, verify=False'),
    ):
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    folder = tmp_path / "data" / "cifar10_vit"
    parts = ("private_embeddings", "private_labels", "public_embeddings", "public_truth", "test_embeddings")
    table = EmbeddingsDataModule(
        **{name: folder / f"{name}.npy" for name in (*parts, "test_labels")}, num_classes=10
    )
    table.setup("fit")
    assert sizes(table) == [60, 15, 5]


def test_pixels_are_the_values_themselves():
    from pl_privknn.features import Pixels

    images = torch.rand(4, 2, 3, 3)
    assert torch.equal(Pixels()(images), images.reshape(4, 18))
    torch.testing.assert_close(Pixels(normalize=True)(images).norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("name", ["linear_probe", "mlp"])
def test_dense_networks_take_embeddings(name):
    from pl_privknn.networks import build_network

    network = build_network(name, num_classes=4, in_channels=7, image_size=1)
    vectors = torch.rand(3, 7, 1, 1)
    assert network(vectors).shape == (3, 4)
    torch.testing.assert_close(network(vectors), network.classifier(network.features(vectors)))
    if name == "linear_probe":
        assert torch.equal(network.features(vectors), vectors.flatten(1))
