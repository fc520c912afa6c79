"""``privknn export``: a finished student as one file that needs none of this package, with what its privacy is."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path
from typing import Any

#: What goes with a model, where the run left it.
_BESIDE = ("summary.json", "privacy_card.md", "privacy_card.json")
# Largest difference of a probability between the student and the file.
_TOLERANCE = 1e-4


def add_export(commands: Any) -> None:
    """Register ``privknn export`` with argparse's subparsers."""
    parser = commands.add_parser(
        "export", help="a finished student as one file, with its summary and privacy card"
    )
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--format", choices=("torch", "onnx"), default="torch", help="torch.export's .pt2, or ONNX"
    )
    parser.add_argument("--output", default=None, metavar="DIR", help="folder for the files (RUN/export)")
    parser.set_defaults(run=run_export)


def run_export(parsed: argparse.Namespace) -> int:
    """Write the model, check it against the student, and copy what says how private it is."""
    run = Path(parsed.run_dir)
    if parsed.format == "onnx" and (
        lacking := [name for name in _ONNX if importlib.util.find_spec(name) is None]
    ):
        raise RuntimeError(f"--format onnx needs {' and '.join(lacking)}; pip install 'pl-privknn[onnx]'")
    student = finished_student(run)
    output = Path(parsed.output or run / "export")
    output.mkdir(parents=True, exist_ok=True)
    path = export_student(student, output, parsed.format)
    for name in _BESIDE:
        if (run / name).is_file():
            shutil.copyfile(run / name, output / name)
    print(path)
    return 0


def finished_student(run: Path) -> Any:
    """The student of a run, from its configuration and last checkpoint.

    Raises:
        FileNotFoundError: where the folder holds no finished run.
        ValueError: for a student of another package, which its own code has to load.
    """
    from pl_privknn.cli.run_folder import CHECKPOINT
    from pl_privknn.configuration import known_classes
    from pl_privknn.documents import read_document
    from pl_privknn.students.base import Student

    for name in ("config.yaml", "summary.json", str(CHECKPOINT)):
        if not (run / name).is_file():
            raise FileNotFoundError(f"{run}: there is no {name}; give the folder of a finished run")
    model = read_document(run / "config.yaml")["model"]
    found = known_classes().get(model["class_path"])
    if found is None:
        raise ValueError(f"model.class_path={model['class_path']} is none of the project's students")
    if not issubclass(found, Student):
        raise ValueError(
            f"model.class_path={model['class_path']} is no student; give the folder of a run that has one"
        )
    return found.load_from_checkpoint(run / CHECKPOINT, map_location="cpu", weights_only=True).eval()


def export_student(student: Any, output: Path, kind: str) -> Path:
    """Write a student that maps images, float ``(n, c, h, w)`` in 0 … 1, to probabilities, float ``(n, classes)``.

    Args:
        student: a student of this package, in ``eval`` mode.
        output: folder for the file.
        kind: ``"torch"`` or ``"onnx"``.

    Raises:
        RuntimeError: where the file says something else than the student.
    """
    import torch

    class Probabilities(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = student

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.student.outputs.probabilities(self.student(images))
            return found

    settings = student.hparams
    shape = (int(settings["in_channels"]), int(settings["image_size"]), int(settings["image_size"]))
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    module = Probabilities().eval()
    batch = {"images": {0: torch.export.Dim("batch", min=1)}}
    with torch.inference_mode(False), torch.no_grad():
        wanted = module(images)
        if kind == "torch":
            path = output / "model.pt2"
            torch.export.save(torch.export.export(module, (images,), dynamic_shapes=batch), path)
            said = torch.export.load(path).module()(images)
        else:
            import onnxruntime

            path = output / "model.onnx"
            torch.onnx.export(
                module, (images,), str(path), dynamo=True, dynamic_shapes=batch, external_data=False
            )
            session = onnxruntime.InferenceSession(str(path))
            (values,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
            said = torch.from_numpy(values)
    if not torch.allclose(said, wanted, atol=_TOLERANCE):
        path.unlink()
        raise RuntimeError(
            f"{path.name} differs from the student by {(said - wanted).abs().max():.2g}; not written"
        )
    return path


_ONNX = ("onnx", "onnxscript", "onnxruntime")
