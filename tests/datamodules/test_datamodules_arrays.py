"""Data modules of arrays, in memory and from .npy and .npz files."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser

from pl_privknn.datamodules import ArraysDataModule, EmbeddingsDataModule


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
    assert parser.instantiate_classes(parser.parse_args(words)).data.counts["num_private"] == 5


BAD_FLOATS = np.full((9, 4, 5), 0.5)
BAD_FLOATS[3, 2, 1] = 7.125
NOT_NUMBERS = BAD_FLOATS.clip(0, 1)
NOT_NUMBERS[3, 2, 1] = np.nan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"public_images": np.zeros((7, 4), np.uint8)},
            r"public_images: shape \(n, 4\).*EmbeddingsDataModule",
        ),
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
        ({"private_labels": np.zeros((9, 1), int)}, r"private_labels: shape \(n, 1\)"),
        ({"private_labels": np.zeros(8, int)}, "private_labels: not as many labels as images"),
        ({"private_images": np.zeros((0, 4, 5)), "private_labels": np.zeros(0, int)}, "private set is empty"),
        ({"public_truth": np.arange(7) - 2}, "public_truth: .* -1 where it isn't known"),
        ({"test_labels": None}, "test_images and test_labels go together"),
        ({"val_labels": [0]}, "val_images and val_labels go together"),
        ({"private_images": "images.txt"}, "images.txt': want a .npy, .npz or"),
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


@pytest.mark.parametrize("test_part", [True, False])
def test_attributes_of_arrays(tmp_path, test_part):
    arguments = array_arguments()
    for name in ("private_labels", "public_truth", "test_labels"):
        arguments[name] = np.stack(
            [arguments[name] == 0, arguments[name] > 0, arguments[name] == 2], 1
        ).astype(int)
    np.save(tmp_path / "labels.npy", arguments["private_labels"])
    arguments["public_truth"][2] = -1
    if not test_part:
        arguments["test_images"] = arguments["test_labels"] = None
    data = ArraysDataModule(
        **{**arguments, "private_labels": str(tmp_path / "labels.npy")}, task="multilabel"
    )
    data.setup("fit")
    data.setup("test")
    assert (data.task, data.public.task) == ("multilabel", "multilabel")
    assert torch.equal(data.private.labels, torch.from_numpy(arguments["private_labels"]))
    assert torch.equal(data.public.truth, torch.from_numpy(arguments["public_truth"]))
    assert data.test.labels.shape == (5 if test_part else 0, 3)
    wrong = ArraysDataModule(**{**arguments, "private_labels": np.arange(9) % 3}, task="multilabel")
    with pytest.raises(ValueError, match=r"private_labels: .*want whole numbers of shape \(n, 3\)"):
        wrong.setup("fit")


@pytest.mark.parametrize("kind", [ArraysDataModule, EmbeddingsDataModule])
def test_labels_of_public_records_are_called_truth(kind):
    private = {"private_images": None, "private_embeddings": None}
    name = f"private_{'images' if kind is ArraysDataModule else 'embeddings'}"
    arguments = {
        name: private[name],
        name.replace("private", "public"): np.zeros((3, 4)),
        "private_labels": [0],
    }
    with pytest.raises(TypeError, match=r"public_labels: .* are public_truth="):
        kind(**arguments, public_labels=[0, 1, 0], num_classes=2)
