"""Data as people have them: what each odd file, table or array is read as, or the one line that refuses it."""

import csv
import io
import json
import os
import unicodedata
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from pl_privknn.datamodules import (
    ArraysDataModule,
    EmbeddingsDataModule,
    ImageFolderDataModule,
    TextDataModule,
)
from pl_privknn.datamodules.at import data_at
from pl_privknn.datamodules.base import CLASSES_ARE_PUBLIC
from pl_privknn.datamodules.tables import KEYS_ARE_PUBLIC

SECRET = "Zwqkxjvy"
SIDE = 8


def checked(make, wanted, told=""):
    """Make and load a data module; ``wanted`` is a function of it, or the words of its refusal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(wanted, str):
            with pytest.raises((ValueError, FileNotFoundError, TypeError), match=wanted) as refused:
                make().setup("fit")
            assert "\n" not in str(refused.value)
            assert SECRET not in str(refused.value)
            assert refused.value.__cause__ is None
            return
        data = make()
        data.setup("fit")
    assert wanted(data)
    words = " ".join(str(one.message) for one in caught)
    assert told in words
    assert SECRET not in words


# ---------------------------------------------------------------------------- folders


def picture(path, seed=None, kind=None, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = abs(hash(str(path))) % 2**32 if seed is None else seed
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, kind, **options)
    return path


def own_folder(root):
    for part in ("private/cat", "private/dog", "public", "test/cat", "test/dog"):
        for number in range(3):
            picture(root / part / f"{number}.png")
    return root


def folder_size(private=6, public=3, test=6):
    return lambda data: (len(data.private), len(data.public), len(data.test)) == (private, public, test)


def copied(name):
    """A copy of a private record."""

    def change(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((root / "private/cat/0.png").read_bytes())

    return change


def noise(name):
    def change(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(np.random.default_rng(0).bytes(400))

    return change


def saved(name, kind=None, **options):
    return lambda root: picture(root / name, kind=kind, **options)


def linked(name, to):
    def change(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink((root / to).resolve(), root / name)

    return change


def elsewhere(root):
    picture(root.parent / "more" / "9.png")
    os.symlink(root.parent / "more", root / "private/cat/more")


def cut(name):
    def change(root):
        path = picture(root / name)
        path.write_bytes(path.read_bytes()[:-60])

    return change


def renamed(name, to):
    return lambda root: (root / name).rename(root / to)


def accents(root):
    for part, form in (("private", "NFD"), ("test", "NFC")):
        picture(root / part / unicodedata.normalize(form, "café") / "1.png")


def broken_exif(root):
    picture(root / "public/e.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(range(60)))


def value_of(name, image):
    """A public picture of one colour."""

    def change(root):
        image().save(root / "public" / name)

    return change


def shows(value, tolerance=0.01):
    """The last public image is of this grey."""

    def wanted(data):
        image = data.public.images([len(data.public) - 1])
        return len(data.public) == 4 and bool(((image - value / 255).abs() < tolerance).all())

    return wanted


def palette():
    image = Image.new("P", (SIDE, SIDE), 1)
    image.putpalette([0, 0, 0, 90, 90, 90])
    return image


def clear_palette():
    image = palette()
    image.info["transparency"] = 1
    return image


LEFT = ": records are left out:"
MORE = folder_size(private=7)
SAME = folder_size()
FOLDERS = {
    "a notebook's copy": (copied("private/cat/.ipynb_checkpoints/0-checkpoint.png"), SAME),
    "a hidden folder": (copied("private/dog/.cache/0.png"), SAME),
    "an archive's folder": (noise("private/__MACOSX/cat/._0.png"), SAME),
    "a file server's folder": (noise("private/cat/@eaDir/0.png/thumb.jpg"), SAME),
    "a resource fork": (noise("private/cat/._0.png"), SAME),
    "a hidden public folder": (noise("public/.thumbnails/0.png"), SAME),
    "a copy under another name": (copied("private/cat/0 (1).png"), SAME),
    "a copy in another class": (copied("private/dog/0 (1).png"), MORE),
    "thumbnails of Windows": (noise("public/Thumbs.db"), SAME),
    "settings of macOS": (noise("test/cat/.DS_Store"), SAME),
    "settings of Windows": (noise("private/cat/desktop.ini"), SAME),
    "jfif": (saved("private/cat/9.jfif", "JPEG"), MORE),
    "capitals": (saved("private/cat/9.JPG"), MORE),
    "webp": (saved("private/cat/9.webp"), MORE),
    "tif": (saved("private/cat/9.TIF", "TIFF"), MORE),
    "jpeg 2000": (saved("private/cat/9.jp2"), MORE),
    "a name of its wrong format": (saved("private/cat/9.png", "JPEG"), MORE),
    "a subfolder": (saved("private/cat/deep/er/9.png"), MORE),
    "texts among public pictures": (noise("public/readme.md"), SAME, "1 .md"),
    "a film among public pictures": (noise("public/a.mp4"), SAME, "1 .mp4"),
    "no suffix": (noise("public/LICENSE"), SAME, "1 without suffix"),
    "texts among private pictures": (noise(f"private/cat/{SECRET}.txt"), SAME),
    "a linked folder": (elsewhere, MORE),
    "a link that is a loop": (linked("private/cat/loop", "private/cat"), SAME),
    "a link to a record": (linked("private/cat/again.png", "private/cat/0.png"), SAME),
    "a link to nothing": (linked("private/cat/gone.png", "nowhere.png"), SAME),
    "a public link to private files": (
        linked("public/more", "private/cat"),
        "public: it, or a link in it, leads to private",
    ),
    "a test link to a private file": (
        linked("test/cat/9.png", "private/cat/0.png"),
        "test: it, or a link in it, leads to private",
    ),
    "a cut private picture": (cut(f"private/cat/{SECRET}.png"), SAME),
    "a cut public picture": (cut("public/9.png"), SAME, f"public{LEFT} 1 with an unreadable file"),
    "a cut test picture": (cut("test/dog/9.jpg"), SAME, f"test{LEFT} 1 with an unreadable file"),
    "an empty private file": (lambda root: (root / "private/cat/9.png").touch(), SAME),
    "a private file outside classes": (saved("private/9.png"), SAME),
    "a test file outside classes": (saved("test/9.png"), SAME, f"test{LEFT} 1 with no class folder"),
    "a class without private records": (saved("test/owl/1.png"), folder_size(test=7)),
    "a class of the public part": (saved("public/owl/1.png"), lambda data: data.class_names == ("cat", "dog", "owl")),
    "a class of the private part": (saved(f"private/{SECRET}/1.png"), "private has folders that aren't among"),
    "classes that differ in case": (saved("test/Cat/1.png"), "'Cat' and 'cat' differ in case or spaces alone"),
    "classes that differ in spaces": (saved("test/cat /1.png"), "'cat' and 'cat ' differ in case or spaces alone"),
    "accents in two forms": (accents, lambda data: data.num_classes == 3 and len(data.private) == 7),
    "classes that YAML knows": (
        lambda root: [renamed(f"{part}/cat", f"{part}/no")(root) for part in ("private", "test")],
        lambda data: data.class_names == ("dog", "no"),
    ),
    "no public folder": (renamed("public", "others"), "no folder 'public' there"),
    "public pictures in the test set": (
        lambda root: (root / "public/9.png").write_bytes((root / "test/cat/0.png").read_bytes()),
        SAME,
        "1 public example in the test part",
    ),
    "broken EXIF": (broken_exif, folder_size(public=4)),
    "clear": (value_of("z.png", lambda: Image.new("RGBA", (SIDE, SIDE), (9, 99, 9, 0))), shows(255)),
    "half clear": (value_of("z.png", lambda: Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 128))), shows(127)),
    "clear grey": (value_of("z.png", lambda: Image.new("LA", (SIDE, SIDE), (5, 0))), shows(255)),
    "palette": (value_of("z.png", palette), shows(90)),
    "clear palette": (value_of("z.png", clear_palette), shows(255)),
    "16 bits": (value_of("z.png", lambda: Image.fromarray(np.full((SIDE, SIDE), 90 << 8, np.uint16))), shows(90)),
    "16 bits of TIFF": (value_of("z.tif", lambda: Image.fromarray(np.full((SIDE, SIDE), 257, np.uint16))), shows(1)),
    "one bit": (value_of("z.png", lambda: Image.new("1", (SIDE, SIDE), 1)), shows(255)),
    "CMYK": (value_of("z.jpg", lambda: Image.new("CMYK", (SIDE, SIDE), (0, 0, 0, 0))), shows(255, 0.02)),
    "floats": (value_of("z.tif", lambda: Image.new("F", (SIDE, SIDE), 0.5)), SAME, "1 with an unreadable file"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_odd_folders(tmp_path, name):
    change, wanted, *told = FOLDERS[name]
    root = own_folder(tmp_path / "own")
    change(root)
    checked(lambda: ImageFolderDataModule(root, SIDE), wanted, *told)
    if not isinstance(wanted, str):  # init's reader
        checked(lambda: data_at(root), lambda data: len(data.private) >= 6)


# ---------------------------------------------------------------------------- tables


def vector(text):
    return [float(len(text)), float(ord(text[0])), float(sum(map(ord, text)))]


def rows(part, labels=("sport", "money"), count=6):
    named = {"private": SECRET}.get(part, part)
    return [
        {"text": f"{named} {number}, and more", "label": labels[number % len(labels)]}
        for number in range(count)
    ]


def as_csv(rows, separator=",", **options):
    file = io.StringIO(newline="")
    made = csv.DictWriter(file, list(rows[0]), delimiter=separator, **options)
    made.writeheader()
    made.writerows(rows)
    return file.getvalue()


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table_folder(root, suffix=".csv", encoding="utf-8", written=as_csv, **parts):
    """Parts by their rows or texts; those that are not given are plain."""
    root.mkdir()
    for part in ("private", "public", "test"):
        given = parts.get(part, rows(part))
        text = given if isinstance(given, str) else written(given)
        (root / f"{part}{suffix}").write_bytes(text.encode(encoding))
    return root


def plain(data):
    return (
        (len(data.private), len(data.public), len(data.test)) == (6, 6, 6)
        and data.class_names == ("money", "sport")
        and data.private.labels.tolist() == [1, 0] * 3
    )


def sizes(private=6, public=6, test=6):
    return lambda data: (len(data.private), len(data.public), len(data.test)) == (private, public, test)


def with_classes(*names):
    return lambda data: data.class_names == names and len(data.private) == 6


def labelled(*labels, **changed):
    return {part: rows(part, changed.get(part, labels)) for part in ("private", "public", "test")}


def extra(part, *more):
    return {part: [*rows(part), *more]}


def lines_with(part, line):
    return {part: as_csv(rows(part)) + line + "\r\n"}


JSONL = {"written": as_lines, "suffix": ".jsonl"}
TABLES = {
    "commas": ({}, plain),
    "semicolons": ({"written": lambda rows: as_csv(rows, ";")}, plain),
    "tabs": ({"written": lambda rows: as_csv(rows, "\t"), "suffix": ".tsv"}, plain),
    "bars": ({"written": lambda rows: as_csv(rows, "|")}, plain),
    "tabs in a .csv": ({"written": lambda rows: as_csv(rows, "\t")}, plain),
    "capitals": ({"suffix": ".CSV"}, plain),
    "spaces after commas": (
        {"written": lambda rows: as_csv(rows).replace('",', '", ').replace("text,", "text, ")},
        plain,
    ),
    "quotes behind spaces": (
        {"written": lambda rows: as_csv(rows, quoting=csv.QUOTE_ALL).replace('","', '", "')},
        plain,
    ),
    "spaces in quotes": (
        {"public": 'text,label\n"  a, ""b"" ",sport\n'},
        lambda data: data.shown_texts("public", torch.tensor([0])) == ['  a, "b" '],
    ),
    "everything quoted": ({"written": lambda rows: as_csv(rows, quoting=csv.QUOTE_ALL)}, plain),
    "lines of Unix": ({"written": lambda rows: as_csv(rows, lineterminator="\n")}, plain),
    "empty lines": ({"written": lambda rows: "\n" + as_csv(rows, lineterminator="\n\n")}, plain),
    "an index": ({"written": lambda rows: as_csv([{"": number, **row} for number, row in enumerate(rows)])}, plain),
    "a comma at each end": ({"written": lambda rows: as_csv(rows).replace("\r\n", ",\r\n")}, plain),
    "a mark": ({"encoding": "utf-8-sig"}, plain),
    "a mark in JSON": ({"encoding": "utf-8-sig", **JSONL}, plain),
    "UTF-16": ({"encoding": "utf-16"}, plain),
    "UTF-16 without a mark": ({"encoding": "utf-16-le"}, plain),
    "UTF-16 of big ends in JSON": ({"encoding": "utf-16-be", **JSONL}, plain),
    "a list in JSON": ({"written": json.dumps, "suffix": ".json"}, plain),
    "lines with another suffix": ({"written": as_lines, "suffix": ".ndjson"}, plain),
    "latin-1": ({"encoding": "latin-1", **labelled("sport", "moné")}, "public='.*can't be read .* by encoding="),
    "latin-1 by name": (
        {"encoding": "latin-1", **labelled("sport", "moné")},
        with_classes("moné", "sport"),
        "",
        {"encoding": "latin-1"},
    ),
    "an encoding that is none": ({}, r"can't be read \(LookupError\).*by encoding=", "", {"encoding": "latin-99"}),
    "a ragged public row": (
        lines_with("public", "a,b,c"),
        "public=.*: row 8 has more or fewer cells than the header",
    ),
    "a ragged private row": (lines_with("private", f"{SECRET},b,c"), "private=.*: some row has more or fewer cells"),
    "a short private row": (lines_with("private", SECRET), "private=.*: some row has more or fewer cells"),
    "a quote without end": (lines_with("private", f'"{SECRET}'), "private=.*: some row has .* a quote without end"),
    "a quote that takes rows along": ({"private": f'text,label\na,"{SECRET}\nb,money\n'}, "a quote without end"),
    "a column twice": ({"public": "text,label,text\na,sport,b\n"}, "public=.* has more than one column 'text'"),
    "no header": ({"private": f"{SECRET},sport\nb,money\n"}, "private=.* has no column 'text': name the right one"),
    "a line that is no JSON": ({**JSONL, "private": as_lines(rows("private")) + SECRET}, "some line is no JSON"),
    "a public line that is no JSON": ({**JSONL, "public": as_lines(rows("public")) + "x"}, "line 7 is no JSON"),
    "numbers for objects": ({**JSONL, "private": "1\n2\n"}, r"private=.*can't be read \(TypeError\)"),
    "an empty file": ({"private": ""}, r"private=.*can't be read"),
    "empty private texts": (extra("private", {"text": " ", "label": "sport"}, {"text": "", "label": "money"}), plain),
    "no private label": (extra("private", {"text": "x", "label": ""}, {"text": "x", "label": "nan"}), plain),
    "empty private texts, strictly": (
        extra("private", {"text": "", "label": "sport"}),
        "private: some records cannot be used: no text",
        "",
        {"unusable": "error"},
    ),
    "an empty public text": (extra("public", {"text": "", "label": ""}), plain, f"public{LEFT} 1 with no text"),
    "no test label": (extra("test", {"text": "x", "label": " "}), plain, f"test{LEFT} 1 with no label"),
    "no public label": (
        extra("public", {"text": "x", "label": ""}),
        lambda data: data.public.truth.tolist()[-1] == -1,
    ),
    "a private row twice": (extra("private", rows("private")[0]), sizes(private=7)),
    "a private text with another label": (
        extra("private", {**rows("private")[0], "label": "money"}),
        sizes(private=7),
    ),
    "a public text of the test set": (extra("public", rows("test")[0]), plain, "1 public example in the test part"),
    "a public text of the test set, strictly": (
        extra("public", rows("test")[0]),
        "in the test part",
        "",
        {"overlap": "error"},
    ),
    "anagrams": (
        {"public": [{"text": "stop", "label": "sport"}], "test": [{"text": "spot", "label": "money"}]},
        sizes(6, 1, 1),
    ),
    "an unknown private class": (
        {"private": [*rows("private"), {"text": "x", "label": SECRET}]},
        "some labels are none of the classes money, sport",
    ),
    "classes that differ in case": (
        labelled("sport", "money", public=("Sport", "money")),
        "'Sport' and 'sport' differ in case or spaces",
    ),
    "classes that YAML knows": (labelled("yes", "no"), with_classes("no", "yes")),
    "classes like numbers": (labelled("1e3", "007"), with_classes("007", "1e3")),
    "a class null": (labelled("null", "none"), with_classes("none", "null")),
    "whole floats in one part": (labelled(0, 1, public=(0.0, 1.0)), with_classes("0", "1")),
    "truth values": ({**labelled(True, False), **JSONL}, with_classes("False", "True")),
    "whole floats in JSON": ({**labelled(1.0, 2.0), **JSONL}, with_classes("1", "2")),
    "NaN in JSON": (
        {**extra("public", {"text": "x", "label": float("nan")}), **JSONL},
        with_classes("money", "sport"),
    ),
    "half a surrogate": ({**JSONL, **extra("private", {"text": "\ud800x", "label": "sport"})}, sizes(private=7)),
    "other columns": (
        {"written": lambda rows: as_csv(rows).replace("text,label", "body,class")},
        plain,
        "",
        {"text": "body", "label": "class"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_odd_tables(tmp_path, name):
    given, wanted, *rest = TABLES[name]
    told, arguments = (*rest, *("", {})[len(rest) :])
    root = table_folder(tmp_path / "1e3", **given)
    checked(lambda: TextDataModule(root, features=vector, **arguments), wanted, told)


class Frame:
    """A data frame without Arrow, as older ones are."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self._columns[name]


def columns_of(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


class Pairs(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return tuple(self.rows[place].values())


HELD = {
    "tables of Arrow": lambda rows: pa.table(columns_of(rows)),
    "old data frames": lambda rows: Frame(columns_of(rows)),
    "columns": columns_of,
    "rows": list,
    "a torch data set": Pairs,
    "categories": lambda rows: pa.table(
        {"text": columns_of(rows)["text"], "label": pa.array(columns_of(rows)["label"]).dictionary_encode()}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_people_hold_in_memory(name):
    parts = {part: HELD[name](rows(part)) for part in ("private", "public", "test")}
    checked(lambda: TextDataModule(**parts, features=vector), plain)


@pytest.mark.parametrize(
    ("public", "wanted"),
    [
        (np.array([0.0, 1.0, np.nan] * 2), [0, 1, -1] * 2),
        (np.array([0, 1] * 3, np.uint8), [0, 1] * 3),
        (np.array([0, 1] * 3, np.uint64), [0, 1] * 3),
        ([0, None, 1] * 2, [0, -1, 1] * 2),
    ],
)
def test_types_of_labels_in_columns(public, wanted):
    whole = {"label": pa.array([0, 1] * 3)}
    parts = {
        part: pa.table({"text": columns_of(rows(part))["text"], **whole}) for part in ("private", "test")
    }
    parts["public"] = pa.table({"text": columns_of(rows("public"))["text"], "label": pa.array(public)})
    checked(
        lambda: TextDataModule(**parts, features=vector),
        lambda data: data.class_names == ("0", "1") and data.public.truth.tolist() == wanted,
    )


def test_vectors_that_are_missing_or_not_finite_are_left_out():
    vectors = [[1.0, 2.0], None, [float("nan"), 1.0], [3.0, None], [5.0, 6.0], [7.0, 8.0]]
    parts = {
        part: pa.table({"text": vectors, "label": ["a", "b"] * 3}) for part in ("private", "public", "test")
    }
    checked(
        lambda: TextDataModule(**parts, overlap="ignore"),
        lambda data: (
            data.private.images().flatten(1).tolist() == [[1, 2], [5, 6], [7, 8]] and len(data.public) == 3
        ),
        "public: records are left out: 3 with NaN or infinite values",
    )


# ---------------------------------------------------------------------------- arrays

COUNT = 12
PLAIN = np.arange(COUNT) % 3


def arrays(**changed):
    draw = np.random.default_rng(0)
    made = {
        f"{part}_images": draw.integers(0, 255, (COUNT, 8, 8), dtype=np.uint8)
        for part in ("private", "public", "test")
    }
    return {**made, "private_labels": PLAIN, "test_labels": PLAIN, **changed}


def every(change):
    """All labels in another form."""
    return {"private_labels": change(PLAIN), "test_labels": change(PLAIN)}


def pixels(change):
    return {name: change(images) for name, images in arrays().items() if name.endswith("images")}


def spoiled(value):
    labels = PLAIN.astype(float)
    labels[4] = value
    return labels


def usual(data):
    return (
        data.num_classes == 3
        and torch.equal(data.private.labels, torch.from_numpy(PLAIN))
        and len(data.public) == COUNT
    )


def without_fourth(data):
    return data.num_classes == 3 and data.private.labels.tolist() == [*PLAIN[:4], *PLAIN[5:]]


def nan_at_fourth(images):
    images = images / 255.0
    images[4, 2, 2] = np.nan
    return images


NAMES = np.array(["cat", "dog", "owl"])
ARRAYS = {
    **{
        f"labels of {kind}": (every(lambda labels, kind=kind: labels.astype(kind)), usual)
        for kind in ("uint8", "uint16", "uint32", "uint64", "int8", ">i4", ">u2", "float32", "float16")
    },
    "labels in a list": (every(np.ndarray.tolist), usual),
    "labels in a column": (every(lambda labels: labels[:, None]), usual),
    "one-hot labels": (every(lambda labels: np.eye(3)[labels]), usual),
    "one-hot labels of truth values": (every(lambda labels: np.eye(3, dtype=bool)[labels]), usual),
    "string labels": (
        every(lambda labels: NAMES[labels]),
        lambda data: usual(data) and data.class_names == tuple(NAMES),
    ),
    "string labels in a list": (every(lambda labels: NAMES[labels].tolist()), usual),
    "string labels in another order": (
        {**every(lambda labels: NAMES[labels]), "class_names": ["owl", "dog", "cat"]},
        lambda data: data.private.labels.tolist() == (2 - PLAIN).tolist(),
    ),
    "an unknown string": (
        {**every(lambda labels: NAMES[labels]), "private_labels": [SECRET] * COUNT},
        "private_labels: some labels lie outside",
    ),
    "strings that differ in case": (
        every(lambda labels: np.array(["cat", "Cat", "owl"])[labels]),
        "differ in case or spaces",
    ),
    "labels of fractions": ({"private_labels": PLAIN / 2}, "private_labels: .* whole numbers"),
    "a private label of NaN": ({"private_labels": spoiled(np.nan)}, without_fourth),
    "a private label of -1": ({"private_labels": spoiled(-1)}, without_fourth),
    "a test label of NaN": (
        {"test_labels": spoiled(np.nan)},
        lambda data: len(data.test) == COUNT - 1,
        f"test{LEFT} 1 with no label",
    ),
    "a public truth of NaN": ({"public_truth": spoiled(np.nan)}, lambda data: data.public.truth.tolist()[4] == -1),
    "labels above all classes": ({"private_labels": PLAIN + 1}, "private_labels: some labels lie outside"),
    "too few labels": ({"private_labels": PLAIN[1:]}, "private_labels: not as many labels as examples"),
    "flat rows": (
        pixels(lambda images: images.reshape(COUNT, 64)),
        lambda data: usual(data) and data.image_shape == (1, 8, 8),
    ),
    "flat rows of no square": (pixels(lambda images: images[:, :7].reshape(COUNT, 56)), "reshape rows of pixels"),
    "floats up to 1": (pixels(lambda images: images / 255), usual),
    "floats up to 255": (pixels(lambda images: images.astype(float)), "divide 0 … 255 data by 255"),
    "whole numbers of 64 bits": (
        pixels(lambda images: images.astype(np.int64)),
        r"expected uint8 .*astype\('uint8'\)",
    ),
    "big ends": (pixels(lambda images: (images / 255).astype(">f4")), usual),
    "NaN in a picture": ({"private_images": nan_at_fourth(arrays()["private_images"])}, without_fourth),
    "NaN in a public picture": (
        {"public_images": nan_at_fourth(arrays()["public_images"])},
        lambda data: len(data.public) == COUNT - 1,
        f"public{LEFT} 1 with NaN or infinite values",
    ),
    "a public picture of the test set": (
        {"public_images": arrays()["test_images"][::-1][:COUNT]},
        "no other public example is left",
    ),
    "persons": (
        {"private_labels": spoiled(-1), "private_groups": np.arange(COUNT)},
        lambda data: data.private_groups.tolist() == [*range(4), *range(5, COUNT)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAYS)
def test_odd_arrays(tmp_path, name):
    changed, wanted, *told = ARRAYS[name]
    given = arrays(**changed)
    checked(lambda: ArraysDataModule(**given), wanted, *told)
    if {"class_names", "private_groups"} & {*given} or any(
        isinstance(value, list) for value in given.values()
    ):
        return
    for argument, value in given.items():  # init's reader
        np.save(tmp_path / f"{argument}.npy", value)
    checked(lambda: data_at(tmp_path), wanted, *told)


@pytest.mark.parametrize("kind", ["array", "npy", "parquet"])
def test_embeddings_that_are_not_finite_are_left_out(tmp_path, kind):
    table = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
    table[4, 1] = np.inf
    source = table
    if kind == "npy":
        np.save(tmp_path / "x.npy", table)
        source = tmp_path / "x.npy"
    elif kind == "parquet":
        pa.parquet.write_table(pa.table({"x": list(table)}), tmp_path / "x.parquet")
        source = f"{tmp_path}/x.parquet:x"
    checked(
        lambda: EmbeddingsDataModule(source, PLAIN, np.ones((2, 4), np.float32), num_classes=3),
        lambda data: without_fourth(data) and bool(torch.isfinite(data.private.images()).all()),
    )


# ---------------------------------------------------------------------------- mutations


def mutated(data, draw):
    data = bytearray(data)
    for _ in range(1 + draw.integers(4)):
        place = int(draw.integers(len(data)))
        match draw.integers(5):
            case 0:
                data[place] = draw.integers(256)
            case 1:
                del data[place : place + int(draw.choice([1, 4, len(data) // 2]))]
            case 2:
                data[place:place] = data[: int(draw.integers(64))]
            case 3:
                data[place:place] = bytes(draw.choice([b'"', b",", b"\n", b"\0", b"\xff", b"[", b"{", b"\\"]))
            case 4:
                data[place : place + 4] = b"\xff\xff\xff\x7f"
        data = data or bytearray(b"x")
    return bytes(data)


def as_parquet(rows):
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table(columns_of(rows)), sink)
    return sink.getvalue()


def as_arrow(rows):
    table, sink = pa.table(columns_of(rows)), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return sink.getvalue()


WRITTEN = {
    ".csv": lambda rows: as_csv(rows).encode(),
    ".jsonl": lambda rows: as_lines(rows).encode(),
    ".parquet": as_parquet,
    ".arrow": as_arrow,
}


@pytest.mark.parametrize("suffix", WRITTEN)
def test_mutated_private_tables_end_in_one_line_without_content(tmp_path, suffix):
    parts = {part: pa.table(columns_of(rows(part))) for part in ("public", "test")}
    path, draw = tmp_path / f"private{suffix}", np.random.default_rng(0)
    whole = WRITTEN[suffix](rows("private"))
    for _ in range(int(os.environ.get("PRIVKNN_MUTATIONS", 150))):
        path.write_bytes(mutated(whole, draw))
        told = ""
        try:
            TextDataModule(private=path, **parts, features=vector).setup("fit")
        except ValueError as error:
            told = str(error)
        assert "\n" not in told
        assert SECRET[:4] not in told
        assert SECRET[4:] not in told


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"])
def test_mutated_private_pictures_are_left_out_one_by_one(tmp_path, kind):
    root, draw = own_folder(tmp_path / "own"), np.random.default_rng(0)
    picture(root / "whole", 1, kind)
    whole = (root / "whole").read_bytes()
    for number in range(int(os.environ.get("PRIVKNN_MUTATIONS", 150))):
        (root / f"private/cat/{SECRET}{number}.{kind.lower()}").write_bytes(mutated(whole, draw))
    checked(lambda: ImageFolderDataModule(root, SIDE), lambda data: len(data.private) >= 6)


# ---------------------------------------------------------------------------- one labelled part


def alone(data):
    others = {*data.conditions} - {"vector computes a vector from one text alone", KEYS_ARE_PUBLIC}
    return others == {CLASSES_ARE_PUBLIC} and not data.has_public and len(data.test) == 0


def test_one_table_is_enough(tmp_path):
    path = tmp_path / "mails.csv"
    odd = [*rows("private"), rows("private")[0], {"text": "", "label": "sport"}, {"text": "x", "label": ""}]
    path.write_bytes(as_csv(odd, ";").encode("utf-8-sig"))
    for make in (
        lambda: TextDataModule(path, features=vector),
        lambda: TextDataModule(private=odd, public="none", features=vector),
        lambda: data_at(path),
        lambda: data_at(path, columns={"text": "text"}),
    ):
        checked(
            make,
            lambda data: alone(data) and len(data.private) == 7 and data.class_names == ("money", "sport"),
        )
    checked(
        lambda: TextDataModule(private=odd, public="none", features=vector),
        lambda data: KEYS_ARE_PUBLIC in data.conditions,
    )
    checked(lambda: data_at(path), lambda data: KEYS_ARE_PUBLIC not in data.conditions)
    table_folder(tmp_path / "parts")
    others = {"public": str(tmp_path / "parts/public.csv"), "test": str(tmp_path / "parts/test.csv")}
    checked(lambda: data_at(path, **others), lambda data: sizes(private=7)(data) and data.conditions == ())
    checked(
        lambda: data_at(path, columns={"classes": ["money", "sport"]}), lambda data: data.conditions == ()
    )


def test_classes_of_one_table_are_not_shown_where_they_are_refused():
    for label, wanted in (
        ("SPORT ", "classes: some classes of the private records differ in case or spaces alone"),
        (None, "classes: the private part has fewer than 2, or more than 1000, classes"),
    ):
        more = [{"text": f"word {n}", "label": label or f"{SECRET}{n}"} for n in range(1 if label else 1001)]
        checked(lambda more=more: TextDataModule(private=[*rows("private"), *more], features=vector), wanted)


def test_one_folder_of_class_folders_is_enough(tmp_path):
    root = own_folder(tmp_path / "own")
    checked(lambda: data_at(root / "private"), lambda data: alone(data) and len(data.private) == 6)
    others = {"public": str(root / "public"), "test": str(root / "test")}
    checked(lambda: data_at(root / "private", **others), lambda data: SAME(data) and data.conditions == ())
    checked(lambda: ImageFolderDataModule(root, public="none"), lambda data: not data.has_public)
    inside = str(root / "private/cat")
    checked(
        lambda: ImageFolderDataModule(root / "private", public=inside),
        "cat: it, or a link in it, leads to private",
    )
    checked(lambda: data_at(tmp_path / "none"), "no such file or folder")


@pytest.mark.parametrize("kind", ["images", "embeddings"])
def test_one_pair_of_arrays_is_enough(tmp_path, kind):
    records = (
        arrays()["private_images"] if kind == "images" else np.random.default_rng(0).normal(size=(COUNT, 4))
    )
    for name, labels in (("numbers", PLAIN), ("words", NAMES[PLAIN])):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / f"{kind}.npy", records)
        np.save(tmp_path / name / "labels.npy", labels)
        np.savez(tmp_path / f"{name}.npz", **{kind: records, "labels": labels})
        for place in (tmp_path / name, tmp_path / f"{name}.npz"):
            checked(
                lambda place=place: data_at(place),
                lambda data: alone(data) and data.private.labels.tolist() == PLAIN.tolist(),
            )
