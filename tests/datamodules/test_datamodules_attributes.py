"""CelebA and Market-1501: read from their own file formats, split by person, refused when damaged."""

import shutil

import numpy as np
import pytest
import torch
from paper_checks import CELEBA_SMALL, MARKET_SMALL, disjoint, sizes, write_papers
from paper_data import published
from PIL import Image
from scipy.io import savemat

from pl_privknn.datamodules import CelebADataModule, DamagedFileError, Market1501DataModule
from pl_privknn.datamodules.celeba import CELEBA_ATTRIBUTES
from pl_privknn.datamodules.market1501 import MARKET_ATTRIBUTES


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    contents = write_papers(root)
    with published(root):
        yield root, contents


def file_of(part, row):
    """Name of the file that an image comes from."""
    return part.store.store._paths[part.store.rows[row]].name


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
    held_out = [file_of(part, row) for part in (data.public, data.test) for row in range(len(part))]
    assert sorted(held_out) == names[48:]
    rows = torch.cat([data.public.truth, data.test.labels])
    assert [values[names.index(name)].tolist() for name in held_out] == rows.tolist()
    image = Image.open(root / "celeba" / "img_align_celeba" / held_out[0]).resize((24, 24), Image.BILINEAR)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    torch.testing.assert_close(data.public.images([0])[0], expected)
    lazy = CelebADataModule(root, **CELEBA_SMALL)
    lazy.setup("test")
    assert not bool(lazy.test.store.store._cached.any())


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
    rows = [int(file_of(two.private, row)[:6]) - 1 for row in range(15)]
    assert two.private.labels.tolist() == values[rows][:, [31, 4]].tolist()
    assert two.private_groups.tolist() == [1000 + row % 10 for row in rows]
    with pytest.raises(ValueError, match="'Grumpy' is not one of"):
        CelebADataModule(root, attributes=["Grumpy", "Bald"])
    with pytest.raises(ValueError, match="num_public=31: there are 30 such images"):
        CelebADataModule(root, num_public=31).setup("test")


def test_celeba_damage_is_refused_by_name(written, tmp_path):
    root, _ = written
    folder = tmp_path / "celeba"
    shutil.copytree(root / "celeba", folder)
    data = {"root": tmp_path, **CELEBA_SMALL}
    for name in ("list_attr_celeba.txt", "list_eval_partition.txt", "identity_CelebA.txt"):
        before = (folder / name).read_text()
        (folder / name).write_text(before[:-30])
        with pytest.raises(FileNotFoundError, match=r"CelebADataModule\(root=.*altered; put the lists"):
            CelebADataModule(**data).setup("fit")
        (folder / name).write_text(before)
    picture = folder / "img_align_celeba" / "000003.jpg"
    picture.write_bytes(picture.read_bytes()[:300])
    cut_off = CelebADataModule(**data)
    cut_off.setup("fit")
    with pytest.raises(ValueError, match=r"000003\.jpg is not a readable image"):
        cut_off.private.images()
    picture.unlink()
    with pytest.raises(FileNotFoundError, match=r"img_align_celeba: 1 of 40 images .* 000003\.jpg"):
        CelebADataModule(**data).setup("fit")
    shutil.rmtree(folder / "img_align_celeba")
    with pytest.raises(FileNotFoundError, match=r"files are missing in .*img_align_celeba there"):
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
        name: [int(file_of(part, row)[:4]) for row in range(len(part))]
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
    with pytest.raises(
        DamagedFileError, match="bounding_box_train: 48 images and 12 people in the table, want"
    ):
        Market1501DataModule(root).setup("fit")
    folder = tmp_path / "Market-1501-v15.09.15"
    shutil.copytree(root / "Market-1501-v15.09.15", folder)
    data = {"root": tmp_path, **MARKET_SMALL}
    with pytest.raises(ValueError, match="num_public_people=12: there are 12 people"):
        Market1501DataModule(**{**data, "num_public_people": 12}).setup("fit")
    with pytest.raises(ValueError, match="num_test=25: there are 24 such"):
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
    with pytest.raises(DamagedFileError, match=r"market_attribute\.mat doesn't have all people") as caught:
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
    with pytest.raises(DamagedFileError, match=r"market_attribute\.mat: no sound file"):
        Market1501DataModule(**data).setup("test")
    savemat(table, {"market_attribute": {"train": {"age": [1]}, "test": {"age": [1]}}})
    with pytest.raises(DamagedFileError, match="no attribute 'image_index'"):
        Market1501DataModule(**data).setup("test")
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"missing in .*market_attribute\.mat, .*github\.com"):
        Market1501DataModule(**data).setup("test")
    shutil.rmtree(folder / "bounding_box_test")
    with pytest.raises(FileNotFoundError, match=r"missing in .*bounding_box_test"):
        Market1501DataModule(**data).setup("test")
