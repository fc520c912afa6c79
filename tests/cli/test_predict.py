"""Predictions by a run, by its exported file and in Python: the same classes, with their names."""

import csv
import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from pl_privknn import Predictions, predict
from pl_privknn.callbacks.loggers import PublicPictures
from pl_privknn.cli import main
from pl_privknn.datamodules import DigitsDataModule
from pl_privknn.students import SupervisedStudent
from tests.privacy.ledger.ledger_setup import needs_fork, paid_run
from tests.setup.forked import in_child

NAMES = ("ant", "bee", "cat")


def finished(folder, task="multiclass", **sizes):
    """What a finished run leaves, with an untrained student."""
    torch.manual_seed(0)
    given = {"network": "small_cnn", "num_classes": 3, "in_channels": 3, "image_size": 8, **sizes}
    student = SupervisedStudent(**given, task=task)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(student)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    (folder / "config.yaml").write_text("model: {class_path: SupervisedStudent}\n")
    nothing, pictures = np.zeros((0, 3), dtype=np.int64), np.zeros((0, 1, 1, 1), np.uint8)
    PublicPictures(
        0, nothing[:, 0], pictures, (), nothing[:, 0], NAMES, nothing[:, :0], nothing, pictures, ()
    ).write(folder)
    paid_run(folder)
    return student.eval()


@pytest.fixture
def run(tmp_path):
    """A run on photographs, and three photographs of other sizes."""
    student = finished(tmp_path / "run")
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path, student


def rows_of(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_hand(student, folder):
    """Probabilities of photographs by the rule that the exported file states."""
    images = [
        np.asarray(Image.open(path).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR))
        for path in sorted(folder.glob("*.png"))
    ]
    with torch.no_grad():
        return student(torch.tensor(np.stack(images)).permute(0, 3, 1, 2) / 255).softmax(1)


def test_a_run_names_the_classes_of_photographs(run, capsys):
    folder, student = run
    output = folder / "said.csv"
    words = ["predict", str(folder / "run"), str(folder / "photos"), "--output", str(output)]
    assert main(words) == 0
    assert capsys.readouterr().out.split()[-1] == str(output)
    wanted, rows = by_hand(student, folder / "photos"), rows_of(output)
    assert [row["class"] for row in rows] == [NAMES[place] for place in wanted.argmax(1)]
    assert [row["input"] for row in rows] == [str(folder / "photos" / f"{number}.png") for number in range(3)]
    said = [float(row["probability"]) for row in rows]
    assert said == pytest.approx(wanted.amax(1).tolist(), abs=1e-5)


def test_predictions_do_not_replace_a_file_unless_told_to(run, monkeypatch, capsys):
    folder, _ = run
    monkeypatch.chdir(folder)
    for name in ("predictions.csv", "predictions-2.csv", "predictions-3.csv"):
        assert main(["predict", "run", "photos/0.png"]) == 0
        assert capsys.readouterr().out.split()[-1] == name
    assert main(["predict", "run", "photos", "--output", "predictions.csv"]) == 2
    assert "replace it by --force" in capsys.readouterr().err
    assert len(rows_of("predictions.csv")) == 1
    assert main(["predict", "run", "photos", "--output", "predictions.csv", "--force"]) == 0
    assert len(rows_of("predictions.csv")) == 3


@needs_fork
def test_the_exported_file_says_the_same_and_states_what_it_takes(run):
    folder, student = run

    def export():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main(["export", str(folder / "run")]) == 0
        path = folder / "run" / "export" / "model.pt2"
        found = predict(path, folder / "photos")
        torch.testing.assert_close(
            found.probabilities, by_hand(student, folder / "photos"), atol=1e-5, rtol=1e-4
        )
        assert found.class_names == NAMES
        files = {"model.json": ""}
        model = torch.export.load(path, extra_files=files).module()
        about = json.loads(files["model.json"])
        assert (about["input"], about["shape"]) == ("images", [3, 8, 8])
        assert about["range"] == {"float32": [0, 1], "uint8": [0, 255]}
        pixels = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
        with torch.no_grad():
            wanted = student(pixels / 255).softmax(1)
        for taken in (pixels, pixels / 255):
            torch.testing.assert_close(model(taken), wanted, atol=1e-5, rtol=1e-4)
        if hasattr(torch.export, "default_decompositions"):  # torch 2.4 takes float64, which it converts
            with pytest.raises(RuntimeError, match="Expected: Float, Got: double"):
                model(pixels.double() / 255)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert about["classes"] == list(NAMES)
        assert (about["epsilon"], about["unit"]) == (summary["epsilon"], "record")
        assert "BILINEAR" in about["resize"]
        for bad in (torch.rand(1, 3, 8, 8) * 255, torch.rand(2, 3, 8, 8) - 0.5):
            with pytest.raises(RuntimeError, match="divide 0 … 255 by 255"):
                model(bad)
        assert main(["predict", str(path)]) == 2

    assert in_child(export) == 0


@pytest.mark.long
def test_onnx_says_the_same_and_refuses_other_ranges(run):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    folder, student = run
    assert main(["export", str(folder / "run"), "--format", "onnx"]) == 0
    path = folder / "run" / "export" / "model.onnx"
    found = predict(path, folder / "photos")
    torch.testing.assert_close(found.probabilities, by_hand(student, folder / "photos"), atol=1e-4, rtol=1e-3)
    assert found.class_names == NAMES
    session = runtime.InferenceSession(path)
    about = json.loads(session.get_modelmeta().custom_metadata_map["model.json"])
    assert about["range"] == {"float32": [0, 1]}
    images = {"images": np.full((1, 3, 8, 8), 200, dtype=np.float32)}
    assert np.isnan(session.run(None, images)[0]).all()
    with pytest.raises(Exception, match=r"Actual: \(tensor\(uint8\)\)"):
        session.run(None, {"images": np.zeros((1, 3, 8, 8), dtype=np.uint8)})


def test_arrays_of_uint8_and_of_floats_are_the_same_images(run):
    folder, _ = run
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    np.save(folder / "bytes.npy", pixels)
    np.save(folder / "floats.npy", pixels.astype(np.float32) / 255)
    first, second = (predict(folder / "run", folder / f"{name}.npy") for name in ("bytes", "floats"))
    torch.testing.assert_close(first.probabilities, second.probabilities)
    assert first.names == ("0", "1", "2", "3")


def test_vectors_of_an_array_and_of_a_table(tmp_path):
    finished(tmp_path, network="mlp", in_channels=5, image_size=1)
    vectors = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    pyarrow.parquet.write_table(pyarrow.table({"text": list(vectors)}), tmp_path / "vectors.parquet")
    first, second = (predict(tmp_path, tmp_path / f"vectors.{kind}") for kind in ("npy", "parquet"))
    torch.testing.assert_close(first.probabilities, second.probabilities)
    assert len(first.classes) == 6


def test_attributes_have_a_probability_each(run):
    folder, _ = run
    finished(folder / "many", task="multilabel")
    predict(folder / "many", folder / "photos").write(folder / "many.csv")
    assert list(rows_of(folder / "many.csv")[0]) == ["input", "class", *NAMES]


def test_results_of_a_trainer_get_class_names():
    data = DigitsDataModule()
    student = SupervisedStudent(network="small_cnn", num_classes=10, in_channels=1, image_size=8)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    found = Predictions.of(trainer.predict(student, data), data)
    assert len(found.classes) == len(data.test)
    assert set(found.classes) <= set(data.class_names)


def test_without_inputs_the_runs_own_test_part_is_predicted(tmp_path):
    finished(tmp_path, num_classes=10, in_channels=1)
    (tmp_path / "config.yaml").write_text(
        "model: {class_path: SupervisedStudent}\ndata: {class_path: DigitsDataModule}\n"
    )
    data = DigitsDataModule()
    data.setup("test")
    assert len(predict(tmp_path).names) == len(data.test)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run nowhere", "no such file or folder"),
        ("nowhere photos", "no such file or folder"),
        ("photos photos", "there is no config.yaml; give the folder of a finished run"),
        ("photos/0.png photos", "expected the folder of a run, or model.pt2 or model.onnx"),
        ("damaged.pt2 photos", "is not a file of privknn export"),
        ("run run", "contains no image"),
        ("run damaged.png", "is not a readable image"),
        ("run floats.npy", "divide 0 … 255 by 255"),
        ("run holes.npy", "input 1 holds NaN or infinite numbers"),
        ("run small.npy", "expected (3, 8, 8)"),
        ("run", "no data to predict"),
        ("run photos --output photos", "already exists; name another file"),
        ("run photos --output no/where.csv", "there is no folder"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_is_written(run, words, message, monkeypatch, capsys):
    folder, _ = run
    monkeypatch.chdir(folder)
    Path("damaged.pt2").write_bytes(b"no model")
    Path("damaged.png").write_bytes(b"no image")
    np.save("floats.npy", np.full((2, 8, 8, 3), 200.0, dtype=np.float32))
    holes = np.zeros((2, 8, 8, 3), dtype=np.float32)
    holes[1, 2, 3, 0] = np.nan
    np.save("holes.npy", holes)
    np.save("small.npy", np.zeros((2, 4, 4, 3), dtype=np.uint8))
    before = sorted(folder.rglob("*"))
    assert main(["predict", *words.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert sorted(folder.rglob("*")) == before
