"""A finished student as one file: what it says is what the student says."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml

from pl_privknn import predict
from pl_privknn.callbacks.labeling_round import load_head, save_head
from pl_privknn.cli import main
from pl_privknn.datamodules import PrivatePublicDataModule
from pl_privknn.export import export_run
from pl_privknn.features import HOG, CachedFeatures, Pixels, PublicPCA
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import SufficientStatistics
from pl_privknn.students import SupervisedStudent, VATStudent
from pl_privknn.testing import FreeLedger
from tests.privacy.ledger.ledger_setup import needs_fork, paid_run
from tests.setup.forked import in_child


@pytest.fixture
def run(tmp_path):
    """What a finished run leaves, with a student whose moving average differs from its weights."""
    torch.manual_seed(0)
    student = VATStudent(network="small_cnn", num_classes=4, in_channels=1, image_size=12, ema_decay=0.9)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    _left(tmp_path, student)
    (tmp_path / "config.yaml").write_text("model: {class_path: VATStudent}\n")
    return tmp_path, student.eval()


def _left(folder, student):
    """Leave a checkpoint and a summary of a student."""
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.strategy.connect(student)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")


@needs_fork
def test_the_file_says_what_the_student_says(run, capsys):
    folder, student = run
    paid_run(folder)

    def export():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert main(["export", str(folder)]) == 0
        assert not [
            one for one in caught if "complete tensor" in str(one.message)
        ]  # nothing that a user can act on
        path = Path(capsys.readouterr().out.strip())
        assert path == folder / "export" / "model.pt2"
        model = torch.export.load(path).module()
        for count in (1, 7):
            images = torch.rand(count, 1, 12, 12)
            with torch.no_grad():
                wanted = student(images).softmax(1)
                torch.testing.assert_close(model(images), wanted, atol=1e-5, rtol=1e-4)
        assert (path.parent / "summary.json").read_text() == (folder / "summary.json").read_text()
        assert "| ε | 0.9" in (path.parent / "privacy_card.md").read_text()

    # An export with free sizes starts threads of autograd, after which no other test could fork and train.
    assert in_child(export) == 0


def test_what_is_no_finished_run_and_what_is_not_installed(run, tmp_path, monkeypatch, capsys):
    folder, _ = run
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["export", paid_run(folder), "--format", "onnx"]) == 2
    assert "pip install 'pl-privknn[onnx]'" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.delattr(torch.export, "default_decompositions", raising=False)
    assert main(["export", paid_run(folder), "--format", "onnx"]) == 2
    assert "is too old; update it, or use --format torch" in capsys.readouterr().err
    (folder / "summary.json").unlink()
    assert main(["export", str(folder)]) == 2
    assert "there is no summary.json" in capsys.readouterr().err


@pytest.mark.long
def test_onnx_says_what_the_student_says(run, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    folder, student = run
    assert main(["export", paid_run(folder), "--format", "onnx", "--output", str(folder / "to")]) == 0
    session = runtime.InferenceSession(capsys.readouterr().out.strip())
    images = torch.rand(5, 1, 12, 12)
    (said,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(said), student(images).softmax(1).detach(), atol=1e-4, rtol=1e-3
    )


CONFIG = """
model:
  class_path: SupervisedStudent
  init_args: {extractor: {class_path: CachedFeatures, init_args: {extractor: &learned
    {class_path: PublicPCA, init_args: {components: 6, extractor: EXTRACTOR}}}}}
labeling:
  labeler: {class_path: SufficientStatistics, init_args: {noise_multiplier: 0.5, private_records: 60}}
  released: RELEASED
  features: [*learned]
"""


@pytest.mark.long("Pixels, head")
@needs_fork
@pytest.mark.parametrize("kind", ["HOG, ensemble", "Pixels, head"])
def test_the_file_is_the_model_that_was_released(tmp_path, capsys, kind):
    """A student on features, and a teacher whose releases make a model; the file takes images."""
    torch.manual_seed(0)
    name, released = kind.split(", ")
    inner, given = {"HOG": (HOG, "{}"), "Pixels": (Pixels, "{transform_sqrt: true}")}[name]
    extractor = PublicPCA(inner(**yaml.safe_load(given)), 6)
    student = SupervisedStudent(
        network="mlp", num_classes=4, image_size=12, extractor=CachedFeatures(extractor)
    )
    public = torch.rand(60, 1, 12, 12)
    extractor.fit_public(public)
    features = extractor(public)
    student.whitening.fit(features)
    teacher = SufficientStatistics(noise_multiplier=0.5, private_records=60)
    teacher.fit(PrivateRecords.of(features, torch.arange(60) % 4, 4, public=features))
    teacher.label(features[:5], FreeLedger())
    _left(tmp_path, student)
    save_head(tmp_path, teacher, extractor)
    text = CONFIG.replace("EXTRACTOR", f"{{class_path: {name}, init_args: {given}}}")
    (tmp_path / "config.yaml").write_text(text.replace("RELEASED", released))

    def export():
        assert main(["export", paid_run(tmp_path)]) == 0
        model = torch.export.load(capsys.readouterr().out.strip()).module()
        images = torch.rand(4, 1, 12, 12)
        head = load_head(tmp_path, teacher, extractor)(images)
        with torch.no_grad():
            own = student.eval()(images).softmax(1)
            said = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(
            said, head if released == "head" else (head + own) / 2, atol=1e-5, rtol=1e-4
        )
        assert own.std(dim=0).max() > 0.001
        assert (said - own).abs().max() > 0.01

    assert in_child(export) == 0


@needs_fork
def test_a_network_of_ones_own_is_exported_whole(tmp_path):
    """Its weights are those of the checkpoint, whatever the given network has."""
    network = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 3))  # noqa: E731
    trained, fresh = network(), network()

    class Own(pl.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, images):
            return self.net(images)

    _left(tmp_path, Own(trained))
    (tmp_path / "config.yaml").write_text("labeling: {released: student}\n")
    paid_run(tmp_path)
    shape = (1, 12, 12)
    data = PrivatePublicDataModule(num_classes=3, image_shape=shape, class_names=["ant", "bee", "cat"])

    def export():
        path = export_run(tmp_path, tmp_path / "export", module=Own(fresh), data=data)
        images = torch.rand(4, *shape)
        np.save(tmp_path / "images.npy", images.numpy())
        found = predict(path, tmp_path / "images.npy")
        with torch.no_grad():
            wanted = trained(images).softmax(1)
        torch.testing.assert_close(found.probabilities, wanted, atol=1e-5, rtol=1e-4)
        assert found.class_names == ("ant", "bee", "cat")

    assert in_child(export) == 0
    with pytest.raises(ValueError, match="its parameters do not match"):
        export_run(tmp_path, tmp_path / "other", module=fresh, data=data)
    with pytest.raises(ValueError, match="must be given together"):
        export_run(tmp_path, tmp_path / "other", module=fresh)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["NoisySGD", "somebody.elses.Network"])
def test_a_network_that_is_no_student_is_exported_as_weights(run, name, capsys):
    folder, student = run
    (folder / "config.yaml").write_text(f"model: {{class_path: {name}}}\n")
    assert main(["export", paid_run(folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    weights = torch.load(path, weights_only=True)
    assert weights.keys() == student.state_dict().keys()
    card = json.loads((path.parent / "privacy_card.json").read_text())
    assert card["what_is_released"].startswith("weights of a network")
    assert any("training" in line for line in card["known_exclusions"])
