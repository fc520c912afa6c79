"""A finished student as one file: what it says is what the student says."""

import json
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from forked import in_child
from ledger_setup import needs_fork

from pl_privknn.cli.main import main
from pl_privknn.students import VATStudent


@pytest.fixture
def run(tmp_path):
    """What a finished run leaves, with a student whose moving average differs from its weights."""
    torch.manual_seed(0)
    student = VATStudent(network="small_cnn", num_classes=4, in_channels=1, image_size=12, ema_decay=0.9)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.strategy.connect(student)
    trainer.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    (tmp_path / "config.yaml").write_text("model: {class_path: VATStudent}\n")
    (tmp_path / "summary.json").write_text(json.dumps({"epsilon": 1.0}))
    return tmp_path, student.eval()


@needs_fork
def test_the_file_says_what_the_student_says(run, capsys):
    folder, student = run
    (folder / "privacy_card.md").write_text("card")

    def export():
        assert main(["export", str(folder)]) == 0
        path = Path(capsys.readouterr().out.strip())
        assert path == folder / "export" / "model.pt2"
        model = torch.export.load(path).module()
        for count in (1, 7):
            images = torch.rand(count, 1, 12, 12)
            with torch.no_grad():
                wanted = student(images).softmax(1)
                torch.testing.assert_close(model(images), wanted, atol=1e-5, rtol=1e-4)
        assert json.loads((path.parent / "summary.json").read_text()) == {"epsilon": 1.0}
        assert (path.parent / "privacy_card.md").read_text() == "card"

    # An export with free sizes starts threads of autograd, after which no other test could fork and train.
    assert in_child(export) == 0


def test_what_is_no_finished_run_and_what_is_not_installed(run, tmp_path, monkeypatch, capsys):
    folder, _ = run
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["export", str(folder), "--format", "onnx"]) == 2
    assert "pip install 'pl-privknn[onnx]'" in capsys.readouterr().err
    (folder / "summary.json").unlink()
    assert main(["export", str(folder)]) == 2
    assert "there is no summary.json" in capsys.readouterr().err


def test_onnx_says_what_the_student_says(run, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    folder, student = run
    assert main(["export", str(folder), "--format", "onnx", "--output", str(folder / "to")]) == 0
    session = runtime.InferenceSession(capsys.readouterr().out.strip())
    images = torch.rand(5, 1, 12, 12)
    (said,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(said), student(images).softmax(1).detach(), atol=1e-4, rtol=1e-3
    )


def test_what_is_no_student_is_one_line(run, capsys):
    folder, _ = run
    (folder / "config.yaml").write_text("model: {class_path: NoisySGD}\n")
    assert main(["export", str(folder)]) == 2
    message = capsys.readouterr().err.strip()
    assert "NoisySGD" in message
    assert len(message.splitlines()) == 1
