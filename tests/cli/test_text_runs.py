"""A run on texts from the shell: training, report, export and audit, and what of the texts is in its files."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import yaml
from tokenizers import Tokenizer

from pl_privknn.cli import main
from pl_privknn.export.released_model import released_model

SECRET, PERSON = "Karoline", "Annegret"
TOPICS = {
    "sport": "the team won the match with a late goal",
    "money": "the bank raised rates and shares fell",
}


def as_said(text, number):
    return f'<script>alert("{number}")</script> {text}, {number} times'


def write_part(path, numbers, secret=""):
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["body", "topic", "sender"])
        for number in numbers:
            topic = list(TOPICS)[number % 2]
            sender = f"{PERSON} {number // 4 * 2 + number % 2}" if secret else ""
            rows.writerow([f"{secret} {as_said(TOPICS[topic], number)}", topic, sender])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "data").mkdir()
    for part, numbers in {"private": range(120), "public": range(120, 160), "test": range(770, 790)}.items():
        write_part(folder / "data" / f"{part}.csv", numbers, SECRET if part == "private" else "")
    columns = ["--text", "body", "--label", "topic", "--person", "sender", "--name", "Staff mail"]
    sizes = ["--epsilon", "50", "--private-records", "60", "--delta", "1e-4"]
    config = str(folder / "run.yaml")
    assert main(["init", "--data", str(folder / "data"), *columns, *sizes, "--output", config]) == 0
    words = ["fit", "--config", config, "--run_dir", str(folder / "runs" / "text")]
    # Numbers of the test part are strange to all others, which the student minds less than the teacher's own model.
    words += ["--labeling.released", "student", "--trainer.max_epochs", "40"]
    assert main([*words, "--trainer.logger", "TensorBoardLogger"]) == 0
    assert main(["report", str(folder / "runs" / "text"), "--fast"]) == 0
    assert main(["export", str(folder / "runs" / "text")]) == 0
    return folder / "runs" / "text"


def test_a_run_learns_from_texts(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["answered"] == 40
    assert summary["unit"] == "person"  # owners are named
    assert summary["test_accuracy"] >= 0.9
    assert main(["audit", str(run)]) == 0
    card = (run / "privacy_card.md").read_text(encoding="utf-8")
    assert "| data set | Staff mail |" in card
    assert card.startswith("# Privacy card: Staff mail by ")


def test_texts_are_exported_with_the_default_features(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    settings = yaml.safe_load((copy / "config.yaml").read_text())
    assert settings["data"]["init_args"].pop("features") is not None
    (copy / "config.yaml").write_text(yaml.safe_dump(settings))
    made = released_model(copy)
    assert made.about["input"] == "texts"
    assert made.tokenizer


def test_no_file_holds_a_private_text_or_person_and_public_ones_are_in_the_report_alone(run):
    files = [path for path in run.parent.rglob("*") if path.is_file()]
    assert {"last.ckpt", "config.yaml", "pictures.npz", "report.html", "run.sqlite"} <= {
        file.name for file in files
    }
    for file in files:
        content = file.read_bytes()
        for word in (SECRET, PERSON):
            assert all(word.encode(code) not in content for code in ("utf-8", "utf-32-le", "utf-16-le")), file
        if file.name not in ("pictures.npz", "report.html"):
            assert b"late goal" not in content, file


def test_public_queries_are_shown_as_escaped_text(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    shown = (
        "&lt;script&gt;alert(&#34;128&#34;)&lt;/script&gt; the team won the match with a late goal, 128 times"
    )
    assert f"<q> {shown}</q>" in page
    assert "<script>alert" not in page


def test_the_exported_file_takes_strings(run):
    script = Path(__file__).parents[2] / "docs" / "guides" / "journeys" / "predict_texts_alone.py"
    texts = "\n".join(as_said(text, 771) for text in TOPICS.values())
    done = subprocess.run(
        [sys.executable, script], input=texts, cwd=run / "export", capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TOPICS)


@pytest.mark.long
def test_an_onnx_file_takes_strings(run, tmp_path):
    pytest.importorskip("onnxscript")
    assert main(["export", str(run), "--format", "onnx", "--output", str(tmp_path)]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    files, name = session.get_modelmeta().custom_metadata_map, session.get_inputs()[0].name
    tokenizer, names = Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["model.json"])["classes"]
    for topic, text in TOPICS.items():
        tokens = np.array([tokenizer.encode(as_said(text, 771), add_special_tokens=False).ids])
        assert names[int(session.run(None, {name: tokens})[0].argmax())] == topic


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--text said", "has no column 'said'; it has body, topic, sender: name the right one by --text"),
        ("--text body --label kind", "has no column 'kind': name the right one by --label"),
        ("--text body --label topic --classes sport x", "public: some labels are none of"),
    ],
)
def test_init_on_other_columns(run, words, message, capsys, tmp_path):
    sizes = ["--epsilon", "1", "--private-records", "120", "--output", str(tmp_path / "run.yaml")]
    data = run.parents[1] / "data"
    assert main(["init", "--data", str(data), *words.split(), *sizes]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()


def test_columns_are_those_of_tables(capsys, tmp_path):
    (tmp_path / "public").mkdir()
    words = ["--text", "body", "--epsilon", "1", "--private-records", "120"]
    assert main(["init", "--data", str(tmp_path), *words, "--output", str(tmp_path / "run.yaml")]) == 2
    assert "there are no tables for --text; expected one table, or a folder with" in capsys.readouterr().err
