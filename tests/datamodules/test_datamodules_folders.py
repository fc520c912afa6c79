"""Data modules of folders of images."""

import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from pl_privknn.datamodules import ImageFolderDataModule, datasets, folder
from pl_privknn.datamodules.folder import FileImages


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
    with Image.open(root / "private" / "cat" / "a.png") as image:
        reference = image.convert("L").resize((4, 4), Image.Resampling.BILINEAR)
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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("a.jpg", "RGB"),
        ("a.png", "RGBA"),
        ("a.png", "P"),
        ("a.png", "I;16"),
        ("a.tif", "RGB"),
        ("a.gif", "P"),
    ],
)
def test_large_images_are_reduced_first_and_look_the_same(name, mode, tmp_path, monkeypatch):
    across, down = np.meshgrid(np.linspace(0, 1, 320), np.linspace(0, 1, 240))
    colours = (np.stack([across, down, 1 - across], 2) * 255).astype(np.uint8)
    image = Image.fromarray(colours).convert("RGB" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray((across * 65535).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / name, **({"exif": exif} if not name.endswith("gif") else {}))
    whole = FileImages([tmp_path / name], (3, 10, 8)).read(torch.tensor([0]))
    monkeypatch.setattr(datasets, "LARGE_IMAGE", 1000)
    reduced = FileImages([tmp_path / name], (3, 10, 8)).read(torch.tensor([0]))
    torch.testing.assert_close(reduced, whole, atol=0.03, rtol=0)


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_images_of_231_megapixels_are_read_and_larger_ones_left_out(name, tmp_path, monkeypatch):
    Image.new("L", (15200, 15200), 102).save(tmp_path / name)
    files = FileImages([tmp_path / name], (1, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow's warning would show the size of a private image
        assert files.readable().tolist() == [True]
    torch.testing.assert_close(files.read(torch.tensor([0])), torch.full((1, 1, 8, 8), 0.4))
    monkeypatch.setattr(folder, "_MOST_PIXELS", 10**8)
    assert FileImages([tmp_path / name], (1, 8, 8)).readable().tolist() == [False]


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


def test_folder_mistakes_say_what_to_do(folders, tmp_path):
    root, _ = folders

    def refused(words, size=(6, 8), **named):
        with pytest.raises(ValueError, match=words) as caught:
            ImageFolderDataModule(root, size, **named).setup("fit")
        return str(caught.value)

    with pytest.raises(FileNotFoundError, match="no folder 'private' there; expected <class>/"):
        ImageFolderDataModule(tmp_path / "nowhere")
    draw(root / "test" / "bird" / "b.png", 80)
    refused(r"has folders \(bird\) that aren't among the classes cat, dog", class_names=["cat", "dog"])
    shutil.rmtree(root / "test" / "bird")
    draw(root / "test" / "stray.png", 81)
    refused(r"test: some records cannot be used: 1 with no class folder", unusable="error")
    (root / "test" / "stray.png").unlink()
    shutil.rmtree(root / "test" / "dog")
    draw(root / "test" / "bird" / "b.png", 82)
    # The names of private folders stay private: classes are those of the other parts.
    for named in ({}, {"class_names": ["cat", "bird"]}):
        assert "dog" not in refused("has folders that aren't", **named)
    shutil.rmtree(root / "test")
    assert ImageFolderDataModule(root).class_names == ("cat", "dog")
    shutil.rmtree(root / "private" / "dog")
    refused("1 class folders, expected 2 or more")
    data = ImageFolderDataModule(root, class_names=["dog", "cat"])
    data.setup("fit")
    assert data.private.labels.tolist() == [1, 1]
    refused("image_size=0", 0, class_names=["dog", "cat"])


def test_unreadable_images_are_refused_strictly(folders):
    root, _ = folders
    for path in (root / "public" / "v.png", root / "private" / "dog" / "d.png"):
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"private: some records .* used: an unreadable file") as caught:
        ImageFolderDataModule(root, (6, 8), unusable="error").setup("fit")
    assert "dog" not in str(caught.value)
    assert "d.png" not in str(caught.value)
    (root / "private" / "dog" / "d.png").unlink()
    with pytest.raises(ValueError, match=r"public: some records .*: 1 with an unreadable file"):
        ImageFolderDataModule(root, (6, 8), unusable="error").setup("fit")
