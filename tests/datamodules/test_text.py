"""Tables of texts and of vectors: formats, classes, persons, and what is refused without a word of a record."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch

from pl_privknn.datamodules import TextDataModule
from pl_privknn.datamodules.columns import Columns
from pl_privknn.features.text import TextExtractor
from pl_privknn.privacy.redaction import RedactedError

SECRET = "Karoline"
PARTS = ("private", "public", "test")


def vector(text):
    """A function from one text to its vector."""
    return np.array([len(text), text.count("e"), ord(text[0])], dtype=np.float64) / 100


def rows(part, count=6):
    name = SECRET if part == "private" else part
    return {
        "text": [f'{name} no. {n}, said: "e"\nand más' for n in range(count)],
        "label": [("spam", "ham")[n % 2] for n in range(count)],
        "who": [["Ann", "17", "Bo"][n % 3] for n in range(count)],
        "key": [str(100 + n) for n in range(count)],
        "more": list(range(count)),
    }


def write(path, columns):
    table = pa.table(columns)
    match path.suffix:
        case ".parquet":
            pa.parquet.write_table(table, path, row_group_size=2)
        case ".csv":
            pa.csv.write_csv(table, path)
        case ".jsonl":
            lines = [json.dumps(row, ensure_ascii=False) for row in table.to_pylist()]
            path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
        case ".feather":
            pa.feather.write_feather(table, path)
        case ".arrow":
            with pa.ipc.new_stream(path, table.schema) as stream:  # as datasets writes it
                stream.write_table(table)


def folder(path, suffix=".parquet", **changes):
    path.mkdir(exist_ok=True)
    for part in PARTS:
        columns = {**rows(part), **changes.get(part, {})}
        columns = {name: column for name, column in columns.items() if column is not None}
        write(path / f"{part}{suffix}", columns)
    return path


def module(root, **arguments):
    return TextDataModule(root, **{"features": vector, "person": "who", "id": "key", **arguments})


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".feather", ".arrow"])
def test_every_format_gives_the_same_records(tmp_path, suffix):
    data = module(folder(tmp_path / "data", suffix))
    data.setup()
    texts = {part: rows(part)["text"] for part in PARTS}
    assert data.image_shape == (3,)
    assert data.class_names == ("ham", "spam")
    for part in texts:
        wanted = np.stack([vector(text) for text in texts[part]])
        np.testing.assert_allclose(getattr(data, part).images().flatten(1).numpy(), wanted, rtol=1e-6)
    assert data.private.labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert data.public.truth.tolist() == [1, 0, 1, 0, 1, 0]
    assert data.private_groups.dtype == torch.int64
    assert data.private_groups.tolist() == data.private_groups[:3].tolist() * 2
    assert len(data.private_groups.unique()) == 3
    assert data.private_groups[1] == 17
    assert data.private_ids.tolist() == [100 + n for n in range(6)]
    assert data.shown_texts("public", torch.tensor([4, 1])) == [texts["public"][4], texts["public"][1]]


def test_persons_are_numbered_alike_in_every_file(tmp_path):
    numbers = []
    for suffix, name in ((".csv", "who"), (".parquet", "who"), (".feather", "more"), (".jsonl", "more")):
        data = module(folder(tmp_path / suffix[1:], suffix), person=name)
        data.setup("fit")
        numbers.append(data.private_groups.tolist())
    assert numbers[0] == numbers[1]
    assert numbers[2] == numbers[3] == list(range(6))


def test_parts_as_tables_and_without_labels_persons_or_a_test_part():
    public = {"text": rows("public")["text"], "label": ["ham", None, "", "spam", "ham", "ham"]}
    data = TextDataModule(private=pa.table(rows("private")), public=pa.table(public), features=vector)
    data.setup()
    assert data.public.truth.tolist() == [0, -1, -1, 1, 0, 0]
    assert data.private_groups is data.private_ids is None
    assert len(data.test) == 0
    public.pop("label")
    parts = {"private": pa.table(rows("private")), "public": pa.table(public)}
    data = TextDataModule(**parts, features=vector, classes=["spam", "eggs", "ham"])
    data.setup()
    assert data.public.truth is None
    assert data.private.labels.tolist() == [0, 2, 0, 2, 0, 2]


def test_numbers_as_labels_are_sorted_as_numbers(tmp_path):
    given = {"private": [2, 10, 10, 9, 2, 2], "test": [10, 9, 2, 2, 2, 2], "public": None}
    labels = {part: {"label": column} for part, column in given.items()}
    for suffix in (".csv", ".parquet", ".jsonl"):
        data = module(folder(tmp_path / suffix[1:], suffix, **labels))
        data.setup("fit")
        assert data.class_names == ("2", "9", "10")
        assert data.private.labels.tolist() == [0, 2, 2, 1, 0, 0]


def test_vectors_of_a_toolkit_are_taken_as_they_are(tmp_path):
    table = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    for suffix in (".parquet", ".jsonl", ".arrow"):
        parts = enumerate(PARTS)
        changes = {part: {"text": (table + n).tolist()} for n, part in parts}
        data = TextDataModule(folder(tmp_path / suffix[1:], suffix, **changes), person="who")
        data.setup()
        np.testing.assert_allclose(data.private.images().flatten(1).numpy(), table, rtol=1e-6)
        np.testing.assert_allclose(data.test.images().flatten(1).numpy(), table + 2, rtol=1e-6)
        assert data.shown_texts("public", torch.tensor([0])) is None
    halves = pa.array(list(table.astype(np.float16)), pa.list_(pa.float16(), 4))
    part = pa.table({"text": halves, "label": ["a", "b"] * 3})
    data = TextDataModule(private=part, public=part.slice(0), test=part.slice(0), overlap="ignore")
    data.setup()
    np.testing.assert_allclose(data.public.images().flatten(1).numpy(), table, atol=2e-3)


def test_a_function_sees_one_text_at_a_time(tmp_path):
    seen = []
    data = module(folder(tmp_path / "data"), features=lambda text: seen.append(text) or vector(text))
    data.setup("fit")
    assert all(isinstance(text, str) for text in seen)
    assert set(rows("private")["text"]) <= set(seen)


class Vocabulary:
    """Counts of the words that it has seen, in the order in which they came."""

    def __init__(self):
        self.known = {}

    def __call__(self, text):
        found = np.zeros(50)
        for word in text.split():
            found[self.known.setdefault(word, len(self.known))] += 1
        return found


class OfOthers(TextExtractor):
    """Text extractor of others, which may look at a whole batch."""

    def __call__(self, texts):
        return torch.stack([torch.as_tensor(vector(text) + len(texts)) for text in texts])


def test_extractors_of_others_keep_nothing_of_a_text_for_the_next(tmp_path):
    for features in (Vocabulary(), OfOthers()):
        found = []
        for more in ("", "quite other words before "):
            texts = [more + rows("private")["text"][0], *rows("private")["text"][1:]]
            data = module(folder(tmp_path / f"{len(more)}", private={"text": texts}), features=features)
            data.setup("fit")
            found.append(data.private.images()[1:])
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert f"{type(features).__name__} computes a vector from one text alone" in data.conditions


def test_long_texts_are_read_up_to_the_limit(tmp_path):
    long = "e" * 10_000_000
    for suffix in (".csv", ".jsonl", ".parquet"):
        root = folder(tmp_path / suffix[1:], suffix, private={"text": [long, *rows("private")["text"][1:]]})
        data = module(root, longest=10_000_000)
        data.setup("fit")
        assert data.private.images([0]).flatten()[0] == 100_000
        cut = module(root, longest=70_000)
        cut.setup("fit")
        assert cut.private.images([0]).flatten()[0] == 700
        assert torch.equal(cut.private.images()[1:], data.private.images()[1:])


STRICT = {"unusable": "error"}


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, {"text": "body"}, r"has no column 'body'; it has text, label, who, key, more: name .* by text="),
        ({"private": {"who": None}}, {}, r"private=.* has no column 'who': .* by person="),
        ({"public": {"text": ["a", None, "b", "c", "d", "e"]}}, STRICT, r": 1 with no text \(.* record 2\)"),
        ({"public": {"label": None}, "test": {"label": ["spam"] * 6}}, {}, "have 1 classes in the column 'label'"),
        ({"private": {"who": ["Ann", None] * 3}}, STRICT, "private: some records cannot be used: no person; correct"),
        ({"private": {"key": ["1"] * 6}}, {}, "private: some ids occur more than once"),
        ({"public": {"text": [1, 2, 3, 4, 5, 6]}}, {}, "text='text': the column holds numbers, dates or"),
        ({"public": {"text": [[1.0], [1.0, 2.0]] * 3}}, {"features": None}, "expected a list of equally many"),
        ({}, {"classes": ["one"]}, "num_classes=1 must be a whole number of at least 2"),
        ({"public": {"text": [[1.0]] * 6}}, {}, "'text' holds vectors, which are taken as they are"),
        ({}, {"longest": 0}, "longest=0 must be a whole number"),
        ({}, {"features": lambda text: 1.0}, "features: expected a function that gives one vector"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        module(folder(tmp_path / "data", **changes), **arguments).setup()
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "Ann" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".arrow"])
@pytest.mark.parametrize("part", ["private", "public"])
def test_files_that_are_none_or_hold_other_text_than_utf8(tmp_path, suffix, part):
    root = folder(tmp_path / "data", suffix)
    path = root / f"{part}{suffix}"
    whole = path.read_bytes()
    damaged = [f"{SECRET} is no table".encode() * 100 + b"\xff", b"", whole.replace(b"said", b"s\xffid")]
    for content in damaged if suffix != ".csv" else damaged[1:]:
        path.write_bytes(content)
        said = rf"{part}.*can't be read( \(\w+\); write it again, text in UTF-8|: it is empty)"
        with pytest.raises(ValueError, match=said) as caught:
            module(root).setup()
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None or part == "public"
    path.unlink()
    said = f"there is no {part} part; expected {part} with one of .parquet, .csv"
    with pytest.raises(FileNotFoundError, match=said):
        module(root)


@pytest.mark.parametrize("suffix", [".arrow", ".feather"])
def test_offsets_that_lead_out_of_the_file_are_refused(tmp_path, suffix):
    path = tmp_path / f"private{suffix}"
    offsets = pa.py_buffer(np.array([0, 1 << 30, 2], dtype=np.int32))
    texts = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"abcd"))
    write(path, {"text": texts, "label": ["x", "y"]})
    with pytest.raises(ValueError, match=r"private.*can't be read \(ArrowInvalid\)"):
        Columns("private", path, ["text"]).read("text")


def test_parts_must_be_different_tables(tmp_path):
    root = folder(tmp_path / "data")
    with pytest.raises(ValueError, match="private, public: both are the same table"):
        module(root, public=root / "private.parquet")
    write(root / "private.csv", rows("private"))
    with pytest.raises(ValueError, match=r"private\.csv and private\.parquet; keep one of them"):
        module(root)
    with pytest.raises(ValueError, match=r"public can't be read \(TypeError\)"):
        TextDataModule(private=pa.table(rows("private")), public=7, features=vector)


def test_what_a_function_says_of_private_texts_is_left_out(tmp_path, capfd):
    def extract(text):
        if SECRET in text:
            print(text)
            raise KeyError(text)
        return vector(text)

    with pytest.raises(RedactedError, match=r"KeyError at .*its text may quote a private record") as caught:
        module(folder(tmp_path / "data"), features=extract).setup("fit")
    assert SECRET not in "".join(map(str, (caught.value, caught.value.__cause__, caught.value.__context__)))
    assert SECRET not in "".join(capfd.readouterr())
