"""MNIST and Fashion-MNIST: IDX files read, split, found, downloaded, refused when damaged."""

import gzip
import struct

import numpy as np
import pytest
import torch

from pl_privknn.datamodules import DamagedFileError, FashionMNISTDataModule, MNISTDataModule

TRAIN, HELD_OUT = 20, 11
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_bytes(array, code=8):
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 10, count, dtype=np.uint8)
        if "labels" in name
        else rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, count in zip(FILES, (TRAIN, TRAIN, HELD_OUT, HELD_OUT), strict=True)
    }


def write_idx(folder, arrays, compressed=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        data = idx_bytes(array)
        (folder / f"{name}.gz" if compressed else folder / name).write_bytes(
            gzip.compress(data) if compressed else data
        )


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_mnist_split(tmp_path, arrays, folder, compressed):
    write_idx(tmp_path / folder, arrays, compressed)
    data = MNISTDataModule(tmp_path)
    assert (data.num_classes, data.image_shape) == (10, (1, 28, 28))
    data.setup("fit")
    assert [len(part) for part in (data.private, data.public, data.test)] == [20, 6, 5]
    expected = torch.from_numpy(arrays[FILES[0]])[:, None] / 255
    torch.testing.assert_close(data.private.images(), expected)
    assert data.private.labels.tolist() == arrays[FILES[1]].tolist()
    # Public and test part are the halves of the test file, shuffled, each image with its own label.
    source = {
        image.tobytes(): int(label) for image, label in zip(arrays[FILES[2]], arrays[FILES[3]], strict=True)
    }
    images = torch.cat([data.public.images(), data.test.images()]).mul(255).round().to(torch.uint8)
    labels = torch.cat([data.public.truth, data.test.labels])
    found = {image.numpy().tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
    assert found == source
    assert images[:6, 0].numpy().tobytes() != arrays[FILES[2]][:6].tobytes()


def test_mnist_reads_what_torchvision_reads(tmp_path, arrays):
    from torchvision.datasets import MNIST

    write_idx(tmp_path / "MNIST" / "raw", arrays)
    reference = MNIST(tmp_path, train=True)
    data = MNISTDataModule(tmp_path)
    data.setup("fit")
    assert torch.equal((data.private.images()[:, 0] * 255).round().to(torch.uint8), reference.data)
    assert torch.equal(data.private.labels, reference.targets)


def test_mnist_split_is_the_same_in_every_stage_and_seeded(tmp_path, arrays):
    write_idx(tmp_path, arrays)
    fit, test, other = (
        MNISTDataModule(tmp_path),
        MNISTDataModule(tmp_path),
        MNISTDataModule(tmp_path, split_seed=1),
    )
    fit.setup("fit")
    test.setup("test")
    other.setup("fit")
    assert torch.equal(fit.test.images(), test.test.images())
    assert not torch.equal(fit.public.images(), other.public.images())


def test_num_private_takes_a_fixed_choice(tmp_path, arrays):
    write_idx(tmp_path, arrays)
    chosen = []
    for _ in range(2):
        data = MNISTDataModule(tmp_path, num_private=7)
        data.setup("fit")
        chosen.append(data.private.images())
    assert torch.equal(*chosen)
    everything = {image.tobytes() for image in arrays[FILES[0]]}
    drawn = {(image * 255).round().to(torch.uint8).numpy().tobytes() for image in chosen[0]}
    assert len(drawn) == 7
    assert drawn < everything
    with pytest.raises(ValueError, match="num_private=21: there are 20 such images"):
        MNISTDataModule(tmp_path, num_private=21).setup("fit")
    with pytest.raises(ValueError, match="num_private=0"):
        MNISTDataModule(tmp_path, num_private=0)


def test_num_public_leaves_the_test_half_alone(tmp_path, arrays):
    write_idx(tmp_path, arrays)
    whole, part = MNISTDataModule(tmp_path), MNISTDataModule(tmp_path, num_public=4)
    whole.setup("fit")
    part.setup("fit")
    assert torch.equal(part.public.images(), whole.public.images(slice(4)))
    assert torch.equal(part.public.truth, whole.public.truth[:4])
    assert torch.equal(part.test.images(), whole.test.images())
    with pytest.raises(ValueError, match="num_public=7: there are 6 such images"):
        MNISTDataModule(tmp_path, num_public=7).setup("fit")


def test_evaluation_needs_no_training_file(tmp_path, arrays):
    write_idx(tmp_path, arrays)
    (tmp_path / FILES[0]).unlink()
    data = MNISTDataModule(tmp_path)
    data.setup("test")
    assert len(data.test) == 5
    with pytest.raises(FileNotFoundError, match=f"{FILES[0]} .*download=True"):
        data.setup("fit")


def test_missing_files_are_named_with_where_they_were_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        MNISTDataModule(tmp_path / "nowhere").setup("fit")
    for words in (FILES[0], "MNISTDataModule(root=", "MNIST/raw", "download=True"):
        assert words in str(caught.value)


def test_fashion_mnist_falls_back_to_the_system_package(tmp_path, arrays, monkeypatch):
    system, root = tmp_path / "system", tmp_path / "root"
    monkeypatch.setattr(FashionMNISTDataModule, "system_folders", (system,))
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        FashionMNISTDataModule(root).setup("test")
    write_idx(system, arrays, compressed=True)
    data = FashionMNISTDataModule(root)
    data.setup("fit")
    assert len(data.private) == TRAIN
    assert data.class_names[9] == "Ankle boot"
    # Files of one's own come first, all or none: labels of another copy are never mixed in.
    write_idx(root / "FashionMNIST" / "raw", {name: array[:4] for name, array in arrays.items()})
    data = FashionMNISTDataModule(root)
    data.setup("fit")
    assert len(data.private) == 4
    (root / "FashionMNIST" / "raw" / FILES[1]).unlink()
    with pytest.raises(FileNotFoundError, match=FILES[1]):
        FashionMNISTDataModule(root).setup("fit")


def test_fashion_mnist_of_the_system_package(tmp_path):
    if not FashionMNISTDataModule.system_folders[0].is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    data = FashionMNISTDataModule(tmp_path)
    data.setup("fit")
    assert [len(part) for part in (data.private, data.public, data.test)] == [60000, 5000, 5000]
    assert data.private.labels.bincount().tolist() == [6000] * 10
    halves = data.public.truth.bincount() + data.test.labels.bincount()
    assert halves.tolist() == [1000] * 10


def test_download_only_on_request_and_only_what_is_missing(tmp_path, arrays, monkeypatch):
    import torchvision

    calls = []

    class FakeMNIST:
        def __init__(self, root, download=False):
            calls.append((root, download))
            write_idx(root / "MNIST" / "raw", arrays)

    monkeypatch.setattr(torchvision.datasets, "MNIST", FakeMNIST)
    MNISTDataModule(tmp_path).prepare_data()
    assert calls == []
    data = MNISTDataModule(tmp_path, download=True)
    data.prepare_data()
    data.prepare_data()
    assert calls == [(tmp_path, True)]
    data.setup("fit")
    assert len(data.private) == TRAIN


IMAGES = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "doesn't begin"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "doesn't begin"),
        (idx_bytes(IMAGES, code=13), "doesn't begin"),
        (idx_bytes(IMAGES[0]), "doesn't begin as an IDX file of 3 dimensions"),
        (idx_bytes(IMAGES)[:9], "buffer is smaller"),
        (idx_bytes(IMAGES)[:-1], "cannot reshape array of size 1567"),
        (idx_bytes(IMAGES) + b"\x00", "cannot reshape"),
        (gzip.compress(idx_bytes(IMAGES))[:-20], "EOFError"),
        (gzip.compress(idx_bytes(IMAGES))[:12] + b"\xff" * 40, "no sound file"),
    ],
)
def test_damaged_idx_files_are_refused_by_name(tmp_path, data, words):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"t10k-images-idx3-ubyte: .*{words}.*download=True"):
        MNISTDataModule(tmp_path).setup("test")


def test_a_random_flip_in_a_compressed_file_is_noticed(tmp_path):
    rng = np.random.default_rng(1)
    packed = gzip.compress(idx_bytes(rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)))
    for position in rng.integers(10, len(packed), 30):  # behind the gzip header, whose time stamp is free
        flipped = bytearray(packed)
        flipped[position] ^= 0x10
        (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(bytes(flipped))
        with pytest.raises(DamagedFileError, match="sound file"):
            MNISTDataModule(tmp_path).setup("test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({FILES[1]: np.zeros(19, np.uint8)}, r"20 images .* 19 labels"),
        ({FILES[0]: np.zeros((20, 27, 28), np.uint8)}, r"\(27, 28\) .*want 2 or more of \(28, 28\)"),
        ({FILES[1]: np.full(20, 77, np.uint8)}, "num_classes=10"),
        ({FILES[2]: np.zeros((1, 28, 28), np.uint8), FILES[3]: np.zeros(1, np.uint8)}, "2 or more"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, arrays, changes, words):
    write_idx(tmp_path, {**arrays, **changes})
    with pytest.raises(ValueError, match=words) as caught:
        MNISTDataModule(tmp_path).setup("fit")
    assert "77" not in str(caught.value).replace(str(tmp_path), "")
