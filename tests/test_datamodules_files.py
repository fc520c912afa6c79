"""Data modules that read files: IDX (MNIST, Fashion-MNIST), .npy / .npz arrays and folders of images."""

import gzip
import re
import shutil
import struct

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from PIL import Image

from pl_privknn.datamodules import (
    ArraysDataModule,
    FashionMNISTDataModule,
    ImageFolderDataModule,
    MNISTDataModule,
)
from pl_privknn.datamodules.idx import IDXError, read_idx

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


# ---------------------------------------------------------------------------- MNIST and Fashion-MNIST


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
    with pytest.raises(ValueError, match=r"num_private=21: the training file has 20 records"):
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
    with pytest.raises(ValueError, match="num_public=7: the public half of the test file has 6 images"):
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
    for words in (FILES[0], FILES[1], "MNISTDataModule(root=", "MNIST/raw", "download=True"):
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
        def __init__(self, root, download):
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
        (idx_bytes(IMAGES, code=13), "0x0d"),
        (idx_bytes(IMAGES[0]), "2 dimensions, images have 3"),
        (idx_bytes(IMAGES)[:9], "within its header"),
        (idx_bytes(IMAGES)[:-1], "cut off: 1567 bytes .* 28, 28"),
        (idx_bytes(IMAGES) + b"\x00", "too long"),
        (gzip.compress(idx_bytes(IMAGES))[:-20], "gzip"),
        (gzip.compress(idx_bytes(IMAGES))[:12] + b"\xff" * 40, "gzip"),
    ],
)
def test_damaged_idx_files_are_refused_by_name(tmp_path, data, words):
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(IDXError, match=f"images-idx3-ubyte: .*{words}"):
        read_idx(path, 3)


def test_a_random_flip_in_a_compressed_file_is_noticed(tmp_path):
    rng = np.random.default_rng(1)
    packed = gzip.compress(idx_bytes(rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)))
    path = tmp_path / "images.gz"
    for position in rng.integers(10, len(packed), 30):  # behind the gzip header, whose time stamp is free
        flipped = bytearray(packed)
        flipped[position] ^= 0x10
        path.write_bytes(bytes(flipped))
        with pytest.raises(IDXError, match="gzip"):
            read_idx(path, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({FILES[1]: np.zeros(19, np.uint8)}, "20 images and .* 19 labels"),
        ({FILES[0]: np.zeros((20, 27, 28), np.uint8)}, "27×28, want 28×28"),
        ({FILES[1]: np.full(20, 77, np.uint8)}, "num_classes=10"),
        ({FILES[2]: np.zeros((1, 28, 28), np.uint8), FILES[3]: np.zeros(1, np.uint8)}, "at least 2"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, arrays, changes, words):
    write_idx(tmp_path, {**arrays, **changes})
    with pytest.raises(ValueError, match=words) as caught:
        MNISTDataModule(tmp_path).setup("fit")
    assert "77" not in str(caught.value).replace(str(tmp_path), "")


# ---------------------------------------------------------------------------- arrays


def array_arguments(shape=(4, 5), dtype=np.uint8, **changes):
    rng = np.random.default_rng(2)

    def images(count):
        if dtype == np.uint8:
            return rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        return rng.random((count, *shape)).astype(dtype)

    arguments = {
        "private_images": images(9),
        "private_labels": np.arange(9) % 3,
        "public_images": images(7),
        "public_truth": np.arange(7) % 3,
        "test_images": images(5),
        "test_labels": np.arange(5) % 3,
        "num_classes": 3,
    }
    return {**arguments, **changes}


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "channels_last", "wanted"),
    [
        ((4, 5), None, (1, 4, 5)),
        ((4, 5), True, (1, 4, 5)),
        ((3, 4, 5), None, (3, 4, 5)),
        ((4, 5, 3), None, (3, 4, 5)),
        ((4, 5, 1), None, (1, 4, 5)),
        ((3, 4, 3), True, (3, 3, 4)),
        ((3, 4, 3), False, (3, 4, 3)),
        ((2, 4, 5), False, (2, 4, 5)),
        ((4, 5, 2), True, (2, 4, 5)),
    ],
)
def test_array_layouts(shape, channels_last, wanted, dtype):
    arguments = array_arguments(shape, dtype, channels_last=channels_last)
    data = ArraysDataModule(**arguments)
    assert data.image_shape == wanted
    data.setup("fit")
    source = arguments["public_images"].astype(np.float64) / (255 if dtype == np.uint8 else 1)
    if len(shape) == 2:
        source = source[:, None]
    elif shape != wanted or channels_last:
        source = np.moveaxis(source, -1, 1)
    images = data.public.images()
    assert images.dtype == torch.float32
    np.testing.assert_allclose(images.numpy(), source, atol=1e-7)


def test_arrays_are_neither_copied_nor_widened():
    arguments = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in array_arguments((4, 5, 3)).items()
    }
    data = ArraysDataModule(**arguments)
    data.setup("fit")
    arguments["private_images"][0] = 255
    assert (data.private.images([0]) == 1).all()
    assert data.private.images([0]).is_contiguous()


def test_arrays_that_torch_cannot_share_are_copied():
    arguments = array_arguments()
    flipped = arguments["private_images"][:, ::-1]
    frozen = arguments["public_images"].copy()
    frozen.flags.writeable = False
    labels = arguments["private_labels"].astype(">i4")
    data = ArraysDataModule(
        **{**arguments, "private_images": flipped, "public_images": frozen, "private_labels": labels}
    )
    data.setup("fit")
    np.testing.assert_allclose(data.private.images()[:, 0].numpy(), flipped / 255, atol=1e-7)
    assert data.private.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("kind", ["npy", "npz", "one npz", "members"])
def test_array_files_from_yaml(tmp_path, kind):
    arguments = array_arguments()
    in_memory = ArraysDataModule(**arguments)
    lines = [
        "data:",
        "  class_path: ArraysDataModule",
        "  init_args:",
        "    num_classes: 3",
        "    batch_size: 5",
    ]
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    if kind == "one npz":
        np.savez_compressed(tmp_path / "all.npz", **arrays)
    if kind == "members":
        np.savez(tmp_path / "all.npz", **{f"my_{name}": value for name, value in arrays.items()})
    for name, value in arrays.items():
        file = {"one npz": "all.npz", "members": f"all.npz:my_{name}"}.get(kind, f"{name}.{kind}")
        path = tmp_path / file
        if kind == "npy":
            np.save(path, value)
        elif kind == "npz":
            np.savez(path, value)
        lines.append(f"    {name}: {path}")
    (tmp_path / "data.yaml").write_text("\n".join(lines))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=pl.LightningDataModule)
    parser.add_argument("--config", action="config")
    config = parser.parse_args([f"--config={tmp_path / 'data.yaml'}"])
    data = parser.instantiate_classes(config).data
    assert isinstance(data, ArraysDataModule)
    assert (data.batch_size, data.image_shape) == (5, (1, 4, 5))
    data.setup("fit")
    in_memory.setup("fit")
    assert torch.equal(data.private.images(), in_memory.private.images())
    assert torch.equal(data.private.labels, in_memory.private.labels)
    assert torch.equal(data.public.truth, in_memory.public.truth)


def test_other_modules_by_bare_names_and_linked_shapes(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=pl.LightningDataModule)
    parser.add_argument("--shape", type=tuple[int, int, int])
    parser.link_arguments("data.image_shape", "shape", apply_on="instantiate")
    words = ["--data=DigitsDataModule", "--data.image_size=12", "--data.eval_batch_size=9", "--data.seed=4"]
    created = parser.instantiate_classes(parser.parse_args(words))
    assert created.shape == (1, 12, 12)
    assert (created.data.eval_batch_size, created.data.seed) == (9, 4)
    words = ["--data=FashionMNISTDataModule", f"--data.root={tmp_path}", "--data.num_private=5"]
    assert parser.instantiate_classes(parser.parse_args(words)).data.num_private == 5


BAD_FLOATS = np.full((9, 4, 5), 0.5)
BAD_FLOATS[3, 2, 1] = 7.125
NOT_NUMBERS = BAD_FLOATS.clip(0, 1)
NOT_NUMBERS[3, 2, 1] = np.nan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"public_images": np.zeros((7, 4), np.uint8)}, r"public_images: shape \(7, 4\)"),
        ({"public_images": np.zeros((7, 3, 4, 3), np.uint8)}, "channels_last=True"),
        ({"public_images": np.zeros((7, 4, 4, 4), np.uint8)}, "channels_last=True"),
        ({"private_images": np.zeros((9, 5, 4), np.uint8)}, r"private_images: images of shape \(1, 5, 4\)"),
        ({"private_images": np.zeros((9, 4, 5), np.int64)}, "private_images: dtype torch.int64; want uint8"),
        ({"private_images": np.full((9, 4, 5), "7.125")}, "private_images: dtype .*; want numbers"),
        ({"private_images": BAD_FLOATS}, "private_images: float values outside"),
        ({"private_images": -BAD_FLOATS.clip(0, 1)}, "private_images: float values outside"),
        ({"private_images": NOT_NUMBERS}, "private_images: float values outside"),
        ({"private_labels": np.arange(9)}, "private_labels: some labels lie outside"),
        ({"private_labels": np.arange(9) - 1}, "private_labels: some labels lie outside"),
        ({"private_labels": np.arange(9) / 8}, "private_labels: .* whole numbers"),
        ({"private_labels": np.zeros((9, 1), int)}, r"private_labels: shape \(9, 1\)"),
        ({"private_labels": np.zeros(8, int)}, "private_labels: 8 labels for 9 images"),
        ({"private_images": np.zeros((0, 4, 5)), "private_labels": np.zeros(0, int)}, "private set is empty"),
        ({"public_truth": np.arange(7) - 2}, "public_truth: .* -1 where it isn't known"),
        ({"test_labels": None}, "test_images and test_labels go together"),
        ({"val_labels": [0]}, "val_images and val_labels go together"),
        ({"private_images": "images.txt"}, "images.txt': want a .npy or .npz"),
    ],
)
def test_bad_arrays_are_refused_without_showing_a_value(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        ArraysDataModule(**array_arguments(**changes)).setup("fit")
    assert "7.125" not in str(caught.value)


def test_bad_array_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"private_images='gone\.npy'"):
        ArraysDataModule(**array_arguments(private_images="gone.npy"))
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "cut.npy", np.zeros((9, 4, 5), np.uint8))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-10])
    (tmp_path / "text.npz").write_bytes(b"no archive")
    np.savez(tmp_path / "others.npz", a=np.zeros(2), b=np.zeros(2))
    for name, words in [
        ("pickled.npy", "can't be read"),
        ("cut.npy", "can't be read"),
        ("text.npz", "can't be read"),
        ("others.npz", "it holds a, b and no array called 'private_images'"),
    ]:
        with pytest.raises(ValueError, match=f"private_images='.*{name}' .*{words}"):
            ArraysDataModule(**array_arguments(private_images=tmp_path / name))


# ---------------------------------------------------------------------------- folders of images


def draw(path, seed, size=(6, 8), mode="RGB"):
    """A file of ``size`` (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = size if mode == "L" else (*size, len(mode))
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def folders(tmp_path):
    """Two classes; the pixels by path relative to the folder."""
    root, pixels, seed = tmp_path / "faces", {}, 0
    for part, names in {
        "private": ["cat/a.png", "cat/deep/b.png", "dog/c.PNG", "dog/d.png", "dog/e.bmp"],
        "public": ["u.png", "v.png", "w.bmp"],
        "test": ["cat/x.png", "dog/y.png"],
    }.items():
        for name in names:
            seed += 1
            pixels[f"{part}/{name}"] = draw(root / part / name, seed)
    (root / "private" / "cat" / "notes.txt").write_text("not an image")
    (root / "private" / ".cache").mkdir()
    (root / "public" / ".hidden.png").write_bytes(b"")
    return root, pixels


@pytest.mark.parametrize("cache", [True, False])
def test_folders_hold_what_was_drawn(folders, cache):
    root, pixels = folders
    data = ImageFolderDataModule(root, (6, 8), cache=cache)
    assert (data.num_classes, data.image_shape, data.class_names) == (2, (3, 6, 8), ("cat", "dog"))
    data.setup("fit")
    assert data.private.labels.tolist() == [0, 0, 1, 1, 1]
    assert data.public.truth is None
    assert data.test.labels.tolist() == [0, 1]
    for part in ("private", "public", "test"):
        names = sorted(name for name in pixels if name.startswith(part))
        drawn = np.stack([pixels[name] for name in names]).transpose(0, 3, 1, 2)
        for indices in ([len(names) - 1, 0, 0], list(range(len(names)))):  # also what is cached by then
            images = getattr(data, part).images(indices)
            torch.testing.assert_close(images, torch.from_numpy(drawn[indices]).float() / 255)


def test_folders_bring_every_kind_of_image_to_one_form(folders):
    root, _ = folders
    grey = draw(root / "public" / "u.png", 50, mode="L")
    draw(root / "public" / "v.png", 51, size=(12, 5), mode="RGBA")
    Image.fromarray(grey).convert("P").save(root / "public" / "palette.gif")
    data = ImageFolderDataModule(root, (6, 8))
    data.setup("fit")
    images = data.public.images()
    assert images.shape == (4, 3, 6, 8)
    expected = torch.from_numpy(grey).float().expand(3, 6, 8) / 255
    torch.testing.assert_close(images[1], expected)  # order: palette.gif, u.png, v.png, w.bmp
    torch.testing.assert_close(images[0], expected)
    small = ImageFolderDataModule(root, 4, grayscale=True)
    small.setup("fit")
    assert small.image_shape == (1, 4, 4) == tuple(small.private.images().shape[1:])
    reference = (
        Image.open(root / "private" / "cat" / "a.png").convert("L").resize((4, 4), Image.Resampling.BILINEAR)
    )
    torch.testing.assert_close(small.private.images([0])[0, 0], torch.from_numpy(np.array(reference)) / 255)


def test_folders_turn_photographs_upright(folders):
    root, _ = folders
    pixels = draw(root / "public" / "u.png", 60, size=(8, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the image must be turned clockwise
    Image.fromarray(pixels).save(root / "public" / "u.png", exif=exif)
    data = ImageFolderDataModule(root, (6, 8))
    data.setup("fit")
    upright = np.ascontiguousarray(np.rot90(pixels, -1).transpose(2, 0, 1))
    torch.testing.assert_close(data.public.images([0])[0], torch.from_numpy(upright) / 255)


def test_public_class_folders_are_truth_and_optional_parts_are_used(folders):
    root, _ = folders
    draw(root / "public" / "dog" / "z.png", 70)
    draw(root / "val" / "cat" / "1.png", 71)
    draw(root / "predict" / "2.png", 72)
    data = ImageFolderDataModule(root, (6, 8))
    data.setup(None)
    assert data.public.truth.tolist() == [1, -1, -1, -1]  # dog/z.png comes first
    assert [len(loader.dataset) for loader in (data.val_dataloader(), data.predict_dataloader())] == [1, 1]
    shutil.rmtree(root / "test")
    without = ImageFolderDataModule(root, (6, 8))
    without.setup("fit")
    assert len(without.test) == 0


def test_folders_train_with_workers(folders):
    root, _ = folders
    data = ImageFolderDataModule(root, (6, 8), batch_size=2, num_workers=1)
    data.setup("fit")
    data.public.set_labels([0, 2], [1, 0])
    batch = next(iter(data.train_dataloader()))[0]
    images, labels = batch["labeled"]
    for image, label in zip(images, labels.tolist(), strict=True):
        torch.testing.assert_close(image, data.public.images([0 if label else 2])[0])


def test_folder_mistakes_say_what_to_do(folders, tmp_path):
    root, _ = folders
    with pytest.raises(FileNotFoundError, match="no folder 'private' there; want private/<class>"):
        ImageFolderDataModule(tmp_path / "nowhere")
    draw(root / "test" / "bird" / "b.png", 80)
    with pytest.raises(ValueError, match=r"1 folders \(bird\) that aren't among the classes cat, dog"):
        ImageFolderDataModule(root, class_names=["cat", "dog"]).setup("fit")
    shutil.rmtree(root / "test" / "bird")
    draw(root / "test" / "stray.png", 81)
    with pytest.raises(ValueError, match="outside the class folders"):
        ImageFolderDataModule(root).setup("fit")
    (root / "test" / "stray.png").unlink()
    shutil.rmtree(root / "test" / "dog")
    draw(root / "test" / "bird" / "b.png", 82)
    # The names of private folders stay private: classes are those of the other parts.
    assert ImageFolderDataModule(root).class_names == ("bird", "cat")
    with pytest.raises(ValueError, match="has 1 folders that aren't") as caught:
        ImageFolderDataModule(root).setup("fit")
    assert "dog" not in str(caught.value)
    with pytest.raises(ValueError, match="has 1 folders that aren't") as caught:
        ImageFolderDataModule(root, class_names=["cat", "bird"]).setup("fit")
    assert "dog" not in str(caught.value)
    shutil.rmtree(root / "test")
    assert ImageFolderDataModule(root).class_names == ("cat", "dog")
    shutil.rmtree(root / "private" / "dog")
    with pytest.raises(ValueError, match="1 class folders, want 2 or more"):
        ImageFolderDataModule(root)
    data = ImageFolderDataModule(root, class_names=["dog", "cat"])
    data.setup("fit")
    assert data.private.labels.tolist() == [1, 1]
    with pytest.raises(ValueError, match="image_size=0"):
        ImageFolderDataModule(root, 0, class_names=["dog", "cat"])


def test_broken_images_are_named_unless_they_are_private(folders):
    root, _ = folders
    for path in (root / "public" / "v.png", root / "private" / "dog" / "d.png"):
        path.write_bytes(path.read_bytes()[:60])
    Image.fromarray(np.zeros((6, 8), np.uint16)).save(root / "public" / "deep.png")
    data = ImageFolderDataModule(root, (6, 8))
    data.setup("fit")
    for index, name in ((0, "deep.png"), (2, "v.png")):
        with pytest.raises(ValueError, match=f"{name} is not a readable image with 8 bits"):
            data.public.images([index])
    with pytest.raises(
        ValueError, match=f"file number 4, .* of {re.escape(str(root / 'private'))} "
    ) as caught:
        list(data.private_batches())
    assert caught.value.__suppress_context__
    for secret in ("dog", "d.png"):
        assert secret not in str(caught.value)


def test_one_file_in_public_and_test_is_noticed(folders):
    root, _ = folders
    shutil.copy(root / "public" / "v.png", root / "test" / "cat" / "copy.png")
    with pytest.raises(ValueError, match="test image 0 is public image 1"):
        ImageFolderDataModule(root).setup("fit")
