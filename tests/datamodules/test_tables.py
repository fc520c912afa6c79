"""Tables of numbers and categories: cells of all kinds, schemas, parts, and messages without a private cell."""

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from pl_privknn.datamodules import TableDataModule, TextDataModule
from pl_privknn.datamodules.at import read_bounds
from pl_privknn.datamodules.cells import CELLS, days_of, kinds_of_noisy_counts, number_of
from pl_privknn.datamodules.columns import Columns
from pl_privknn.datamodules.schema import ColumnSchema, Schema, schema_of
from pl_privknn.datamodules.tables import KEYS_ARE_PUBLIC
from pl_privknn.features import TableFeatures

NAN = math.nan
SECRET = "Mallory"


def read(cells, numeric=None, categorical=None, public=True):
    """Schema of a column and its cells as numbers."""
    table = Columns("public" if public else "private", pa.table({"x": cells}), ["x"])
    schema = schema_of(table, ["x"], numeric or {}, categorical or {}, public)
    return schema.columns[0], schema.filled(schema.read(table, "by columns="))[:, 0].tolist()


def same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-12, equal_nan=True)


# ---------------------------------------------------------------------------- cells


@pytest.mark.parametrize(
    ("cells", "kind", "wanted"),
    [
        (["1", "2.5", "-3", "1e3"], "number", [1, 2.5, -3, 1000]),
        (["1", "", "3", None], "number", [1, NAN, 3, NAN]),
        ([*map(str, range(19)), "NA"], "number", [*range(19), NAN]),
        ([*map(str, range(19)), "n/a"], "number", [*range(19), NAN]),
        (["1,234", "12,345.6", "7"], "number", [1234, 12345.6, 7]),
        (["1.234,5", "2,5", "7"], "number", [1234.5, 2.5, 7]),
        (["2,5", "3,25", "10,0"], "number", [2.5, 3.25, 10]),
        (["1 234", "2\u00a0345", "3\u202f456"], "number", [1234, 2345, 3456]),
        (["1'234", "2\u2019345", "5"], "number", [1234, 2345, 5]),
        (["$5", "$1,200.50", "-$3"], "number", [5, 1200.5, -3]),
        (["5 €", "6,50 €", "7 €"], "number", [5, 6.5, 7]),
        (["10%", "12.5 %", "3%"], "number", [10, 12.5, 3]),
        (["\u22123", "4", "\u22120.5"], "number", [-3, 4, -0.5]),
        (["(3)", "4", "(5.5)"], "number", [-3, 4, -5.5]),
        (["1e308", "1e39", "-1e39"], "number", [1e308, 1e39, -1e39]),
        (["true", "False", "TRUE", ""], "flag", [1, 0, 1, NAN]),
        (["yes", "no", "Yes", "no"], "flag", [1, 0, 1, 0]),
        (["2020-01-02", "2020-01-03", None], "date", [18263, 18264, NAN]),
        (["2020-01-02T12:00", "2020-01-02 06:00:00", "2020-01-02"], "date", [18263.5, 18263.25, 18263]),
        (["2020-01-02T12:00+02:00", "2020-01-02T12:00Z"], "date", [18263 + 10 / 24, 18263.5]),
        (["02.01.2020", "31.12.2020"], "date", [18263, 18627]),
        (["2020/01/02", "2020/1/3"], "date", [18263, 18264]),
        (["02/01/2020", "31/12/2020"], "date", [18263, 18627]),
        (["01/02/2020", "12/31/2020", ""], "date", [18263, 18627, NAN]),
        (["01-02-2020 6:00 PM", "12-31-2020 06:00 UTC"], "date", [18263.75, 18627.25]),
        (["2 Jan 2020", "31 Dec 2020"], "date", [18263, 18627]),
        (["5"], "number", [5]),
        (["5", "5"], "number", [5, 5]),
        (["", "", ""], "category", [0, 0, 0]),
        ([None, None], "category", [0, 0]),
        (["007", "008", "012", "007"], "category", [0, 1, 1, 0]),
        (["1_000", "1_000", "2_000", "2_000"], "category", [0, 0, 1, 1]),
        (["a", "b", "b", "a", ""], "category", [0, 1, 1, 0, 2]),
        (["NA", "NA", "DE", "DE"], "category", [1, 1, 0, 0]),
        (["NA", "1", "?", "2", "-", "none"], "number", [NAN, 1, NAN, 2, NAN, NAN]),
        (["yes", "n/a", "no", "unknown"], "flag", [1, NAN, 0, NAN]),
        (["null", "2020-01-02", "."], "date", [NAN, 18263, NAN]),
        (["NA", "NA", "?", "?"], "category", [1, 1, 0, 0]),
        (["a\nb", "a\nb", "c", "c"], "category", [0, 0, 1, 1]),
        (["é", "é", "ß", "ß"], "category", [1, 1, 0, 0]),
        ([1, 2, 3], "number", [1, 2, 3]),
        ([1.5, None, math.inf], "number", [1.5, NAN, math.inf]),
        ([True, False, None], "flag", [1, 0, NAN]),
        ([2**60, 2**61], "number", [2.0**60, 2.0**61]),
        (pa.array([1, 2], pa.uint64()), "number", [1, 2]),
        (pa.array([1, 2], pa.float16()), "number", [1, 2]),
        (pa.array(["1.5", "2.5"], pa.string()).cast(pa.decimal128(10, 2)), "number", [1.5, 2.5]),
        (pa.array([datetime.date(2020, 1, 2), None]), "date", [18263, NAN]),
        (pa.array([datetime.datetime(2020, 1, 2, 12)], pa.timestamp("ns")), "date", [18263.5]),
        (pa.array([datetime.datetime(2020, 1, 2, 12)], pa.timestamp("s", "UTC")), "date", [18263.5]),
        (pa.array(["a", "b", "a", "b"]).dictionary_encode(), "category", [0, 1, 0, 1]),
        (pa.array([b"a", b"b", b"a", b"b"]), "category", [0, 1, 0, 1]),
    ],
)
def test_cells_of_public_columns(cells, kind, wanted):
    column, found = read(cells)
    assert column.kind == kind
    same(found, wanted)


@pytest.mark.parametrize(
    ("text", "comma", "wanted"),
    [
        ("1,2", False, NAN),
        ("1,2", True, 1.2),
        ("1,2", None, 1.2),
        ("1,234", None, 1234),
        ("[1.0, 2.0]", False, NAN),
        ("1 2", False, NAN),
        ("555 123 4567", False, NAN),
        ("12-3", False, NAN),
        ("--3", False, NAN),
        ("inf", False, NAN),
        ("nan", False, NAN),
        ("0x10", False, NAN),
        (".5", False, 0.5),
        ("5.", False, 5),
        ("+5", False, 5),
    ],
)
def test_texts_that_are_numbers(text, comma, wanted):
    same([number_of(text, comma)], [wanted])


def test_dates_of_either_order_are_refused_unless_it_is_stated():
    cells = ["03/04/2020", "05/06/2020"]
    with pytest.raises(ValueError, match="the day or the month first; say which by numeric="):
        read(cells)
    same(read(cells, numeric={"x": "day first"})[1], [18355, 18418])
    same(
        read(cells, numeric={"x": ("2020-01-01", "2021-01-01", "month first")}, public=False)[1],
        [18325, 18388],
    )


@pytest.mark.parametrize("text", ["20200102", "1234", "tomorrow", "2020-13-01", "", "12:30"])
def test_texts_that_are_no_dates(text):
    assert math.isnan(days_of(text))


def test_a_single_odd_cell_decides_nothing():
    cells = [str(number) for number in range(100)]
    for odd in ("", "x", "1e999", "2020-01-01", "true", "007", SECRET):
        column, found = read([*cells, odd], public=False)
        assert (column.kind, column.bounds, column.values) == ("number", None, None)
        same(found[:100], range(100))


def test_stated_bounds_and_values_come_first():
    column, found = read(["0.5", "9,5", "70"], numeric={"x": (0, 10)}, public=False)
    assert (column.kind, column.bounds) == ("number", (0.0, 10.0))
    same(found, [0.5, 9.5, 70])
    same(Schema((column,)).scaled(torch.tensor(found)[:, None])[:, 0].tolist(), np.float32([0.05, 0.95, 1.0]))
    column, found = read(["2020-01-02"], numeric={"x": ("2020-01-01", "2020-01-11")}, public=False)
    assert (column.kind, column.bounds) == ("date", (18262.0, 18272.0))
    same(found, [18263])
    column, found = read([1, 2, 5, None], categorical={"x": [1, 2, 3]})
    assert (column.kind, column.size) == ("category", 4)
    same(found, [0, 1, 3, 3])


def test_categories_that_nobody_states_go_to_buckets_of_a_public_hash():
    column, found = read(["a", "b", SECRET, ""], public=False)
    assert (column.values, column.size, found[3]) == (None, 17, 16)
    again, more = read(["a", "new"], public=False)
    assert again == column
    assert more[0] == found[0]
    assert all(0 <= place <= 16 for place in more + found)


def test_values_that_occur_once_in_public_rows_share_the_last_category():
    column, found = read(["a", "a", "b", "b", "once"])
    assert column.values == ("a", "b")
    same(found, [0, 0, 1, 1, 2])


def test_public_bounds_are_stretched():
    assert read([0, 10])[0].bounds == (-1.0, 11.0)
    assert read([7, 7])[0].bounds == (3.5, 10.5)
    assert read([0.0, 0.0])[0].bounds == (-0.5, 0.5)


@pytest.mark.parametrize("cells", [[[1.0], [2.0]], [{"a": 1}, {"a": 2}], ["[1.0, 2.0]", "[3. 4.]"]])
def test_columns_of_lists_are_refused(cells):
    with pytest.raises(ValueError, match=r"'x' holds lists; leave it out by columns="):
        read(cells)


@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), (0, math.inf), (0, 1, 2), ("2020-01-01", "never")])
def test_bounds_that_are_none_are_refused(bounds):
    with pytest.raises(ValueError, match=r"expected \[low, high\], numbers or dates"):
        read([1.0, 2.0], numeric={"x": bounds})


def test_a_schema_survives_json():
    table = pa.table({"a": [1.5, 2.5], "b": ["x", "x"], "c": ["2020-01-02", "2020-01-03"], "d": [True, None]})
    columns = Columns("public", table, list("abcd"))
    schema = schema_of(columns, list("abcd"), {}, {}, True)
    again = Schema.of(json.loads(json.dumps(schema.to_list())))
    assert again == schema
    rows = schema.scaled(schema.read(columns, ""))
    assert schema.words(rows) == [["1.5", "x", "2020-01-02", "true"], ["2.5", "x", "2020-01-03", ""]]


# ---------------------------------------------------------------------------- the data module

COLUMNS = {
    "age": ["31", "60", "", "44", "52", "19"],
    "region": ["north", "south", "south", "north", "", "south"],
    "who": ["ann", "ann", "bob", "cid", "cid", "cid"],
    "label": ["no", "yes", "yes", "no", "yes", "no"],
}


def write(path, columns, separator=","):
    rows = zip(*columns.values(), strict=True)
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_forms_of_a_table_give_the_same_rows(tmp_path):
    table = pa.table(COLUMNS)
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, table.to_pylist())))
    excel = "sep=;\n" + write(tmp_path / "plain.csv", COLUMNS, ";").read_text()
    (tmp_path / "excel.csv").write_bytes(excel.replace("\n", "\r\n").encode("utf-16"))
    forms = [
        write(tmp_path / "t.csv", COLUMNS),
        write(tmp_path / "t.tsv", COLUMNS, "\t"),
        tmp_path / "excel.csv",
        tmp_path / "t.parquet",
        tmp_path / "t.jsonl",
        table,
        COLUMNS,
        {name: np.array(column, dtype=object) for name, column in COLUMNS.items()},
        table.to_pylist(),
    ]
    found = []
    for form in forms:
        data = TableDataModule(private=form, public=table.slice(0), person="who")
        data.setup("fit")
        names = [column.name for column in data.schema.columns]
        assert sorted(names) == ["age", "region"]
        order = [names.index("age"), names.index("region")]
        found.append((data.private.images().flatten(1)[:, order], data.private.labels, data.private_groups))
    for rows, labels, groups in found:
        torch.testing.assert_close(rows, found[0][0])
        assert labels.tolist() == [0, 1, 1, 0, 1, 0]
        assert groups.tolist() == found[0][2].tolist()
    assert found[0][0][2, 0] == -1


def test_no_row_is_lost_for_an_empty_cell_but_one_without_any():
    rows = {**COLUMNS, "age": ["31", "60", "", "44", "", "19"]}
    data = TableDataModule(private=rows, public={**COLUMNS})
    data.setup("fit")
    assert len(data.private) == 6 - 0
    without = {**COLUMNS, "age": ["31", "60", "", "44", "", "19"], "who": [""] * 6}
    data = TableDataModule(private=without, public={**COLUMNS, "who": [""] * 6}, columns=["age", "region"])
    data.setup("fit")
    assert len(data.private) == 5  # the fifth has neither


def test_columns_may_come_in_another_order_and_new_ones_are_passed_over():
    other = {name: COLUMNS[name] for name in reversed(COLUMNS)} | {"new": ["1"] * 6}
    data = TableDataModule(private=COLUMNS, public={**COLUMNS}, test=other, overlap="ignore")
    data.setup()
    torch.testing.assert_close(data.test.images(), data.private.images())
    less = {name: COLUMNS[name] for name in COLUMNS if name != "age"}
    data = TableDataModule(private=COLUMNS, public={**COLUMNS}, test=less)
    with pytest.raises(ValueError, match="has no column 'age'"):
        data.setup()


def test_texts_stand_beside_numbers_and_categories():
    notes = ["late again", "", "all is well", "late again", " ", "fine"]
    data = TableDataModule(private={**COLUMNS, "note": notes}, public={**COLUMNS, "note": notes}, text="note")
    data.setup("fit")
    rows = data.private.images().flatten(1)
    assert data.schema.names == ["age", "region", "who", "note"]
    assert rows.shape == (6, 3 + 64)
    torch.testing.assert_close(rows[0, 3:], rows[3, 3:])
    assert ((rows[[1, 4], 3:] == -1).all(), float((rows[0, 3:] - 0.5).norm())) == (True, pytest.approx(1))
    extractor = TableFeatures(data.schema.coordinates)
    extractor.fit_public(data.public.images())
    assert extractor(data.private.images()).shape[1] == extractor.feature_size(data.image_shape)
    for cells, message in (
        (["1", "2", "3"] * 2, "holds numbers, dates"),
        (["[1, 2]"] * 6, "holds lists of numbers"),
    ):
        for kind in (TableDataModule, TextDataModule):
            with pytest.raises(ValueError, match=message):
                kind(private={**COLUMNS, "note": cells}, public={**COLUMNS, "note": cells}, text="note")


def test_equal_rows_are_records():
    data = TableDataModule(private={name: column * 3 for name, column in COLUMNS.items()}, public={**COLUMNS})
    data.setup("fit")
    assert len(data.private) == 18


def test_identifiers_are_left_out(capsys):
    numbers = [str(number) for number in range(30)]
    table = {
        "id": numbers,
        "customer_id": numbers,
        "userId": numbers,
        "name": [f"person {number}" for number in numbers],
        "paid": numbers,
        "label": ["a", "b"] * 15,
    }
    data = TableDataModule(private=table, public={**table})
    assert data.left_out == ["id", "customer_id", "userId", "name"]
    assert [column.name for column in data.schema.columns] == ["paid"]
    assert len(TableDataModule(private=table, public={**table}, columns=["id", "paid"]).schema.columns) == 2


def test_a_private_cell_decides_nothing_about_a_column_that_is_stated_without_bounds():
    def made(cells):
        private = pa.table({"x": cells, "label": [0, 1] * (len(cells) // 2)})
        return TableDataModule(private=private, public="none", classes=["0", "1"], numeric={"x": None})

    dates, numbers = made(["2020-01-01"] * 10), made(["1.5"] * 9 + ["1,5"])
    assert dates.schema == numbers.schema
    assert dates.conditions == numbers.conditions == ()


def test_private_cells_decide_nothing_about_a_column_that_is_stated_as_texts():
    for cells in (["1", "2"] * 5, ["late", "2"] * 5):
        private = pa.table({"x": cells, "label": [0, 1] * 5})
        for kind in (TableDataModule, TextDataModule):
            assert kind(private=private, public="none", classes=["0", "1"], text="x").conditions == ()


@pytest.mark.parametrize(
    "odd",
    [
        pa.array([1, None, 86_400 * 10**9], pa.timestamp("ns")),
        pa.array([1, None, 86_400 * 10**9], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([2**62, None, 86_400], pa.timestamp("s")),
        pa.array([2**62, None, 86_400 * 10**6], pa.timestamp("us")),
        pa.array([2**31 - 1, None, 1], pa.date32()),
    ],
    ids=lambda odd: str(odd.type),
)
def test_a_moment_that_python_does_not_represent_ends_no_run(odd):
    private = Columns("private", pa.table({"x": odd}), ["x"])
    for kind in ("date", "category"):
        assert len(ColumnSchema("x", kind, (0.0, 1.0)).read(private)) == 3
    days = ColumnSchema("x", "date").read(private)
    assert (math.isfinite(days[0]), math.isnan(days[1]), days[2]) == (True, True, 1)
    assert [bool(word) for word in private.words("x")] == [True, False, True]


@pytest.mark.parametrize("kind", ["rows", "data set", "file"])
def test_keys_of_private_records_are_a_condition(kind, tmp_path):
    rows = [{"x": 1, "label": 0}, {"x": 2, "label": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    stated = {"classes": ["0", "1"], "numeric": {"x": None}}
    data_set = torch.utils.data.Subset(rows, [0, 1])
    private = {"rows": rows, "data set": data_set, "file": tmp_path / "rows.jsonl"}[kind]
    assert TableDataModule(private=private, public="none", **stated).conditions == (KEYS_ARE_PUBLIC,)
    assert (
        TableDataModule(private=private, public=pa.table({"x": [1], "label": [0]}), **stated).conditions == ()
    )


@pytest.mark.parametrize(("kind", "cells"), [("number", [datetime.date(2020, 1, 1)] * 2), ("date", [1, 2])])
def test_a_column_of_another_type_is_read_as_its_texts_are(kind, cells):
    column, tables = ColumnSchema("x", kind, (0.0, 1.0)), ({"x": cells}, {"x": [str(cell) for cell in cells]})
    typed, texts = (Columns("private", pa.table(table), ["x"], None, True) for table in tables)
    np.testing.assert_array_equal(column.read(typed), column.read(texts))


def test_what_the_guarantee_rests_on():
    only = TableDataModule(private=COLUMNS)
    assert len(only.conditions) == 2
    assert only.conditions[0].startswith("the kinds of the columns")
    stated = {"numeric": {"age": (0, 120)}, "categorical": {"region": None, "who": None}}
    assert len(TableDataModule(private=COLUMNS, **stated).conditions) == 1
    assert TableDataModule(private=COLUMNS, classes=["no", "yes"], **stated).conditions == ()
    assert TableDataModule(private=COLUMNS, public={**COLUMNS}).conditions == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": "target"}, "have 0 classes|has no column 'target'"),
        ({"columns": ["age", "height"]}, "has no column 'height'"),
        ({"numeric": {"height": (0, 1)}}, "no column 'height'"),
        ({"columns": []}, "no column is left"),
        ({"person": "owner"}, "has no column 'owner'"),
        ({"test": "missing.csv"}, "no such file"),
        ({"classes": ["no"]}, "num_classes=1"),
        ({"classes": ["no", "maybe"]}, "some labels are none of the classes"),
    ],
)
def test_what_is_refused(arguments, message):
    columns = {**COLUMNS, "region": [SECRET] * 6}
    with pytest.raises(ValueError if "test" not in arguments else FileNotFoundError, match=message) as caught:
        TableDataModule(private=columns, **arguments).setup()
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_two_columns_of_one_name_and_too_many_coordinates_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,a,label\n1,2,x\n3,4,y\n")
    with pytest.raises(ValueError, match="more than one column 'a'"):
        TableDataModule(tmp_path / "t.csv")
    wide = {f"x{number}": ["u", "v"] for number in range(500)} | {"label": ["x", "y"]}
    with pytest.raises(ValueError, match="8500 coordinates, 2000 at most"):
        TableDataModule(private=wide)
    narrow = {f"x{number}": [1.0, 2.0] for number in range(500)} | {"label": ["x", "y"]}
    assert TableDataModule(private=narrow).image_shape == (500,)


def test_rows_have_no_bounds_before_the_run_has_paid_for_them():
    data = TableDataModule(private=COLUMNS, test={**COLUMNS}, classes=["no", "yes"])
    data.setup()
    assert data.pays_for_public
    with pytest.raises(ValueError, match="known once a run has paid"):
        data.test.images()
    data.take_columns([{**column, "bounds": [0, 100]} for column in data.columns()])
    assert data.test.images()[1, 0] == pytest.approx(0.6)


def test_a_schema_as_yaml_is_what_bounds_take(tmp_path):
    table = {
        "age": [1.5, 2.5, 3.0],
        "paid": ["1,5", "2,5", "3,5"],
        "yes": ["x", "x", "north: #1"],
        "seen": ["31/12/2020", "02/01/2020", ""],
        "born": ["2020-01-02", "2020-01-03", ""],
        "member": [True, None, False],
        "note": ["a b", "c d", "e"],
    }
    for public in (True, False):
        columns = Columns("public" if public else "private", pa.table(table), list(table))
        schema = schema_of(columns, list(table), {}, {}, public, ["note"])
        (tmp_path / "columns.yaml").write_text(schema.to_yaml(["id"]), encoding="utf-8")
        numeric, categorical, texts = read_bounds(tmp_path / "columns.yaml")
        assert sorted([*numeric, *categorical, *texts]) == sorted(table)
        again = schema_of(columns, list(table), numeric, categorical, public, texts)
        for one, other in zip(schema.columns, again.columns, strict=True):
            assert one.kind == other.kind
            assert one.values == other.values
            assert one.month_first == other.month_first or one.name == "born"
            if one.bounds is not None:
                np.testing.assert_allclose(other.bounds, one.bounds, atol=1.0)


@pytest.mark.parametrize(
    ("parts", "missing", "wanted"),
    [
        ({"decimal point": 1.0}, 0.0, "number"),
        ({"decimal point": 0.7, "number": 0.3}, 0.4, "number"),
        ({"word": 1.0}, 0.0, "category"),
        ({"number": 0.8, "word": 0.2}, 0.0, "category"),
        ({"number": 0.96, "word": 0.04}, 0.0, "number"),
        ({"day first": 0.6, "day or month first": 0.4}, 0.1, "date"),
    ],
)
def test_the_kind_of_a_column_by_noisy_counts(parts, missing, wanted):
    counts = np.array([1000 * (1 - missing) * parts.get(name, 0.0) for name in CELLS] + [1000 * missing])
    noisy = counts + np.random.default_rng(0).normal(0, 20, len(counts))
    assert kinds_of_noisy_counts([noisy.tolist()], 20.0)[0][0] == wanted


def test_kinds_that_noise_hides_follow_from_the_other_columns():
    counts = np.zeros((40, len(CELLS) + 1))
    counts[:, CELLS.index("decimal point")] = 400
    noisy = counts + np.random.default_rng(0).normal(0, 160, counts.shape)
    assert sum(row[1:-1].argmax() + 1 != CELLS.index("decimal point") for row in noisy) == 6
    assert [kind for kind, _, _ in kinds_of_noisy_counts(noisy.tolist(), 160.0)] == ["number"] * 40


def test_dates_beyond_the_calendar_are_shown_by_its_ends():
    # Paid bounds, which noise may move there, are among drawn rows.
    shown = ColumnSchema("since", "date", bounds=(-1e12, 1e12)).shown
    assert [shown(days) for days in (-1e12, 0.9, 11017.0, 1e12)] == [
        "0001-01-01", "1970-01-01", "2000-03-01", "9999-12-31"
    ]  # fmt: skip
