"""Files of plain data: what is read, and what is refused before anything is made of it."""

import json
import math

import pytest

from pl_privknn.documents import (
    MAX_DEPTH,
    DocumentError,
    read_configuration,
    read_document,
    read_yaml,
    write_yaml,
    written_out,
)


def test_numbers_and_words_as_people_write_them():
    text = "[1e-5, 2e1, 1.5, .5, -3, 1.e3, 1E+5, .inf, 2020-01-01, 1e, on time, '1e-5', null, true]"
    numbers = [1e-5, 20.0, 1.5, 0.5, -3, 1000.0, 1e5, math.inf]
    assert read_yaml(text) == [*numbers, "2020-01-01", "1e", "on time", "1e-5", None, True]


def test_json_and_yaml_say_the_same(tmp_path):
    document = {"releases": [{"mechanism": "gaussian", "sigma": 1e-05}], "delta": 1e-05, "name": "ε"}
    (tmp_path / "a.json").write_text(json.dumps(document))
    (tmp_path / "b.yaml").write_text(write_yaml(document))
    (tmp_path / "c.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(document).encode())
    for name in ("a.json", "b.yaml", "c.json"):
        assert read_document(tmp_path / name) == document


def test_what_is_written_needs_no_alias():
    shared = {"betas": [0.9, 0.99]}
    assert read_yaml(write_yaml({"a": shared, "b": shared})) == {"a": shared, "b": shared}


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}, *{before}, *{before}]\n"
    for before, name in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (BOMB, "line 1 has an anchor or alias"),
        ("a: [*b]", "line 1 has an anchor or alias"),
        ("base: {sigma: 1}\nother:\n  <<: {sigma: 2}", "line 3 has a merge key"),
        ("a: 1\nb: {sigma: 20, k: 1, sigma: 200}", "line 2: 'sigma' stands twice"),
        ("'a': 1\na: 2", "line 2: 'a' stands twice"),
        ("? [a]: b", "list or a mapping as key"),
        ("a: !!python/object/apply:os.system ['true']", "has the tag"),
        ("a: !!set {x, y}", "has the tag"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} lists"),
        ("[" * 100_000, f"more than {MAX_DEPTH} lists"),
        ('{"a":' * 5000 + "1" + "}" * 5000, f"more than {MAX_DEPTH} lists"),
        ('{"sigma": 20, "sigma": 200}', "'sigma' stands twice"),
        ('[{"count": 5, "count": 1}]', "'count' stands twice"),
        ("--- 1\n--- 2\n", "neither JSON .* nor YAML"),
        ("a: [1", "neither JSON .* nor YAML"),
        ("\x00\x01", "neither JSON .* nor YAML"),
        ("[" + "9" * 5000 + "]", "neither JSON nor YAML"),
        ("words", "neither JSON .* nor a YAML list or mapping"),
        ("", "neither JSON .* nor a YAML list or mapping"),
    ],
)
def test_what_is_refused(tmp_path, text, match):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(DocumentError, match=match) as refused:
        read_document(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_too_large_are_not_parsed(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"- a\n" * (1 << 17))
    with pytest.raises(DocumentError, match="too large for YAML"):
        read_document(path)
    path.write_bytes(b" " * ((1 << 24) + 1))
    with pytest.raises(DocumentError, match="more than 16 MiB"):
        read_document(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DocumentError, match="neither JSON nor YAML"):
        read_document(path)


def test_depth_up_to_the_limit_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert isinstance(read_document(path), list)
    assert isinstance(read_yaml(path.read_text()), list)


def test_definitions_are_written_out(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "definitions:\n  soft: {sigma: [1, 2]}\n  k: 5\n"
        "a: {definition: soft}\nb: [{definition: k}, {c: {definition: soft}}]\nd: {definition: k, more: 1}\n"
    )
    document = read_configuration(path)
    soft = {"sigma": [1, 2]}
    assert document == {"a": soft, "b": [5, {"c": soft}], "d": {"definition": "k", "more": 1}}
    document["a"]["sigma"].append(3)  # a place of its own
    assert document["b"][1]["c"] == soft


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "definitions: {a: 1}\nb: {definition: c}",
            "definition='c' is not in the section definitions; it has a",
        ),
        ("definitions: {a: 1}\nb: {definition: [a]}", "is not in the section"),
        ("definition: {a: 1}\nb: {definition: a}", "definition='a' is not in .*; it has none, or is missing"),
        ("definitions: [a]\nb: 1", "must be a section"),
        ("definitions: {a: 1}\nb: [" + "{definition: a}, " * 65 + "]", "more than 64 times"),
    ],
)
def test_definitions_that_are_refused(tmp_path, text, match):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(DocumentError, match=match) as refused:
        read_configuration(tmp_path / "run.yaml")
    assert "run.yaml" in str(refused.value)


def test_definitions_do_not_grow():
    definitions = {"a": "x" * 9, "b": [{"definition": "a"}] * 9}
    found = written_out({"definitions": definitions, "c": {"definition": "b"}})
    assert found == {"c": definitions["b"]}
