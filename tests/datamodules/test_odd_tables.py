"""Odd tables as files and objects: read rightly, or refused by name; no message holds a private cell."""

import math
import re
import warnings

import numpy as np
import pyarrow as pa
import pytest

from pl_privknn.datamodules import TableDataModule

NAN = math.nan


def lines(*cells, head="x,label"):
    """CSV with a column of cells and labels a and b by turns."""
    return "\n".join([head, *(f"{cell},{'ab'[place % 2]}" for place, cell in enumerate(cells))]) + "\n"


def many(*cells, **others):
    return lines(*cells * 6, **others)


#: Content of a file, kind of its first column, and the numbers of its first rows between public bounds that are
#: stretched to [0, 12] / 12 of two values: 1/12 and 11/12.
LOW, HIGH = 1 / 12, 11 / 12
READ = {
    "two rows": (lines("1", "2"), "number", [LOW, HIGH]),
    "constant": (many("5"), "number", [0.5, 0.5]),
    "byte order mark": ("\ufeff" + lines("1", "2"), "number", [LOW, HIGH]),
    "Excel's separator": ("sep=;\r\nx;label\r\n1,5;a\r\n2,5;b\r\n", "number", [LOW, HIGH]),
    "Excel's separator and mark": ("\ufeffsep=;\nx;label\n1,5;a\n2,5;b\n", "number", [LOW, HIGH]),
    "UTF-16": (lines("1", "2").encode("utf-16"), "number", [LOW, HIGH]),
    "tabs": (lines("1", "2").replace(",", "\t"), "number", [LOW, HIGH]),
    "bars": (lines("1", "2").replace(",", "|"), "number", [LOW, HIGH]),
    "Windows line ends": (lines("1", "2").replace("\n", "\r\n"), "number", [LOW, HIGH]),
    "no end of line": (lines("1", "2").rstrip(), "number", [LOW, HIGH]),
    "blank lines at the end": (lines("1", "2") + "\n\n\n", "number", [LOW, HIGH]),
    "spaces around names": (lines("1", "2", head=" x , label "), "number", [LOW, HIGH]),
    "quotes": (lines('"1"', '"2"'), "number", [LOW, HIGH]),
    "quotes after spaces": ('x, label\n"1", "a"\n"2", "b"\n', "number", [LOW, HIGH]),
    "line breaks in cells": (many('"up\nand down"', '"left\r\nright"'), "category", [1, 0]),
    "doubled quotes": (many('"a ""b"""', "c"), "category", [0, 1]),
    "separators in cells": (many('"a,b"', '"c,d"'), "category", [0, 1]),
    "a column without name": (lines("1", "2", head=",label"), "number", [LOW, HIGH]),
    "thousands": (many('"1,000"', '"2,000"'), "number", [LOW, HIGH]),
    "decimal commas": (many('"1,5"', '"2,5"'), "number", [LOW, HIGH]),
    "points in thousands": (many('"1.000,5"', '"2.000,5"'), "number", [LOW, HIGH]),
    "currency": (many("€1", "2 €"), "number", [LOW, HIGH]),
    "per cent": (many("5%", "10 %"), "number", [LOW, HIGH]),
    "minus of typesetting": (many("\u22125", "6"), "number", [LOW, HIGH]),
    "accounting": (many("(5)", "6"), "number", [LOW, HIGH]),
    "beyond float32": (many("1e200", "-1e200"), "number", [HIGH, LOW]),
    "beyond float64": (many("1e308", "-1e308"), "number", [1, 0]),
    "beyond int64": (many(2**70, 2**71), "number", [LOW, HIGH]),
    "tiny": (many("1e-300", "2e-300"), "number", [LOW, HIGH]),
    "years": (many("2020", "2021"), "number", [LOW, HIGH]),
    "seconds since 1970": (many("1577836800", "1577923200"), "number", [LOW, HIGH]),
    "0 and 1": (many("0", "1"), "number", [LOW, HIGH]),
    "NA among numbers": (many("1", "NA", "3"), "number", [LOW, None, HIGH]),
    "question marks": (many("1", "?", "3"), "number", [LOW, None, HIGH]),
    "dashes": (many("1", "-", "3"), "number", [LOW, None, HIGH]),
    "numbers after a first block of words": (lines(*["x"] * 3, *map(str, range(97))), "number", [None] * 3),
    "NA as a word": (many("NA", "DE"), "category", [1, 0]),
    "infinite": (many("inf", "1"), "category", [1, 0]),
    "codes": (many("01234", "99999"), "category", [0, 1]),
    "some codes": (many("01234", "12345", "23456", "34567"), "category", [0, 1, 2, 3]),
    "telephones": (many("+49 30 12", "+1 555 1"), "category", [1, 0]),
    "times of day": (many("12:30", "13:45"), "category", [0, 1]),
    "other scripts": (many("é", "ß", "😀"), "category", [1, 0, 2]),
    "Latin-1": (many("é", "ß").encode("latin-1"), "category", [1, 0]),
    "Booleans": (many("true", "False"), "flag", [1, 0]),
    "Booleans with empty cells": (many("yes", "", "no"), "flag", [1, None, 0]),
    "ISO dates": (many("2020-01-01", "2020-02-01"), "date", [LOW, HIGH]),
    "ISO times": (many("2020-01-01T10:00:00Z", "2020-01-01T11:00:00+00:00"), "date", [LOW, HIGH]),
    "zones": (many("2020-01-01 10:00+02:00", "2020-01-01 09:00 UTC"), "date", [LOW, HIGH]),
    "day first": (many("31/01/2020", "01/03/2020"), "date", [LOW, HIGH]),
    "month first": (many("01/31/2020", "03/01/2020 12:00 AM"), "date", [LOW, HIGH]),
    "German dates": (many("31.01.2020", "1.3.2020"), "date", [LOW, HIGH]),
    "named months": (many("31 Jan 2020", '"Mar 1, 2020"'), "date", [LOW, HIGH]),
}
REFUSED = {
    "nothing": (b"", "it is empty; a header and rows are wanted"),
    "blank lines alone": ("\n\n", "it is empty"),
    "header alone": ("x,label\n", "have 0 classes in the column 'label'; name the classes"),
    "one class": (lines("1", "2").replace(",b", ",a"), "have 1 classes"),
    "labels alone": ("label\na\nb\n", "no column is left"),
    "two columns of one name": ("x,x,label\n1,2,a\n3,4,b\n", "more than one column 'x'"),
    "nothing but empty cells": (many(""), "is empty; it needs at least one example"),
    "a cell too many": ("x,label\n1,a,c\n2,b\n", "has more or fewer cells than the header"),
    "an open quote": ('x,label\n"1,a\n2,b\n', "a quote without end"),
    "a comment": ("# made by hand\nx,label\n1,a\n2,b\n", "has more or fewer cells than the header"),
    "other encoding": (many("é", "ß").encode("latin-1"), "or name another encoding"),
    "dates of either order": (many("01/02/2020", "03/04/2020"), "the day or the month first"),
    "lists as text": (many('"[1, 2]"', '"[3, 4]"'), "holds lists"),
    "labels that differ in case": (lines("1", "2", "3").replace("3,a", "3,A"), "classes"),
}


def write(folder, content, name="t.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("case", READ)
def test_odd_files_are_read_rightly(case, tmp_path):
    content, kind, wanted = READ[case]
    files = [write(tmp_path, content, name) for name in ("private.csv", "public.csv")]
    encoding = "latin-1" if case == "Latin-1" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # records without any cell are counted
        columns = None if case != "a column without name" else [""]
        data = TableDataModule(private=files[0], public=files[1], encoding=encoding, columns=columns)
        data.setup("fit")
    (column,) = data.schema.columns
    assert column.kind == kind
    assert data.class_names == ("a", "b")
    rows = data.private.images().flatten().tolist()
    known = [value for value in wanted if value is not None]  # a row without any cell is left out
    np.testing.assert_allclose(rows[: len(known)], known, atol=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_odd_files_are_refused_by_name_and_private_ones_without_a_cell(case, tmp_path):
    content, message = REFUSED[case]
    file = write(tmp_path, content)
    good = {"x": [1.0, 2.0], "label": ["a", "b"]}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        TableDataModule(private=good, public=file).setup("fit")
    assert "\n" not in str(caught.value)
    text = content.decode("latin-1") if isinstance(content, bytes) else content
    cells = {cell for cell in re.split(r"[,\n\"]", text) if len(cell) > 2} - {"label"}
    for public in ("none", good):
        said = ""
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                TableDataModule(private=file, public=public, columns=["x"]).setup("fit")
            except ValueError as error:
                said = str(error)
        said += " ".join(str(note.message) for note in notes)
        assert not [cell for cell in cells if cell in said.replace(str(file), "")]


OBJECTS = {
    "whole labels": ({"x": [1, 2], "label": [3, 11]}, ("3", "11")),
    "float labels": ({"x": [1, 2], "label": [1.0, 0.0]}, ("0", "1")),
    "Boolean labels": ({"x": [1, 2], "label": [True, False]}, ("False", "True")),
    "missing labels": ({"x": [1, 2, 3], "label": ["a", None, "b"]}, ("a", "b")),
    "numpy scalars": (
        [{"x": np.float32(1), "label": np.int8(0)}, {"x": np.int16(2), "label": 1}],
        ("0", "1"),
    ),
    "a column of one type at first": ({"x": [1, 2, "three"], "label": ["a", "b", "a"]}, ("a", "b")),
    "dictionaries": (
        pa.table({"x": pa.array(["u", "v"]).dictionary_encode(), "label": ["a", "b"]}),
        ("a", "b"),
    ),
    "500 columns": ({**{f"x{place}": [1.0, 2.0] for place in range(500)}, "label": ["a", "b"]}, ("a", "b")),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_odd_objects_are_read_rightly(case):
    table, classes = OBJECTS[case]
    data = TableDataModule(private=table, public="none", classes=classes, numeric={}, names=None)
    data.setup("fit")
    assert data.class_names == classes
    assert len(data.private) == 2 + (case == "a column of one type at first")
    again = TableDataModule(private=table, public="none")
    assert again.class_names == classes
    assert again.conditions != ()


def test_rows_of_unseen_categories_alone_are_kept(tmp_path):
    good = {"region": ["north", "south"] * 4, "label": ["a", "b"] * 4}
    new = {"region": ["east", "", "west"]}
    data = TableDataModule(private=good, public={**good}, predict={"region": ["east", "west"]})
    data.setup()
    assert data._predict.read(np.arange(2)).flatten().tolist() == [2, 2]
    with pytest.raises(ValueError, match="some records cannot be used: 1 with no cell"):
        TableDataModule(private=good, public={**good}, predict=new).setup()
