"""``privknn export``: what a run released as one file that needs none of this package, with what its privacy is."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: What goes with a model, where the run left it.
_BESIDE = ("summary.json", "privacy_card.md", "privacy_card.json")
# Largest difference of a probability between the student and the file.
_TOLERANCE = 1e-4


def add_export(commands: Any) -> None:
    """Register ``privknn export`` with argparse's subparsers."""
    parser = commands.add_parser(
        "export", help="the model that a run released as one file, with its summary and privacy card"
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
    student, released = finished_student(run), released_of(run)
    head = None if released == "student" else finished_head(run)
    output = Path(parsed.output or run / "export")
    output.mkdir(parents=True, exist_ok=True)
    path = export_model(student, head, released, output, parsed.format)
    if head is not None or student.extractor is not None:
        print(f"released: {released}; the file takes one image a call", file=sys.stderr)
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
    from pl_privknn.config import known_classes, read_document
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
    section = (model.get("init_args") or {}).get("extractor")
    given = {} if section is None else {"extractor": _extractor(section)}
    return found.load_from_checkpoint(run / CHECKPOINT, map_location="cpu", weights_only=True, **given).eval()


def _extractor(section: Any) -> Any:
    """The extractor that a section names; checkpoints hold only what it learned."""
    from pl_privknn.config import instantiate
    from pl_privknn.features import PublicPCA

    # Any class will do that is made with an extractor, and keeps it as it is.
    return instantiate({"model": {"extractor": section}}, {"model": PublicPCA}).model.extractor


def released_of(run: Path) -> str:
    """Which model a run is for: its summary says it after a test, else its configuration."""
    from pl_privknn.config import read_document

    labeling = read_document(run / "config.yaml").get("labeling") or {}
    return str(read_document(run / "summary.json").get("released") or labeling.get("released") or "student")


def finished_head(run: Path) -> Any:
    """The model that a run's releases make, from its configuration and ``head.pt``.

    Raises:
        FileNotFoundError: where the run left none.
    """
    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.callbacks.labeling_round import HEAD, load_head
    from pl_privknn.callbacks.private_labeler import lasting_extractor
    from pl_privknn.config import instantiate, read_document

    section = read_document(run / "config.yaml").get("labeling")
    labeling = instantiate({"labeling": section}, {"labeling": PrivateLabeler}).labeling
    extractor = lasting_extractor(labeling.features)
    head = None if extractor is None else load_head(run, labeling.labeler, extractor)
    if head is None:
        raise FileNotFoundError(f"{run}: the run released its head, and there is no {HEAD}; restore it")
    return head.eval()


def export_model(student: Any, head: Any, released: str, output: Path, kind: str) -> Path:
    """Write a model that maps images, float ``(n, c, h, w)`` in 0 … 1, to probabilities, float ``(n, classes)``.

    Args:
        student: a student of this package, in ``eval`` mode.
        head: a :class:`~pl_privknn.callbacks.labeling_round.ReleasedHead`; None for the student alone. n is 1 in a
            file with a head or extractor, whose features count images as they go.
        released: one of :data:`~pl_privknn.callbacks.labeling_round.MODELS`.
        output: folder for the file.
        kind: ``"torch"`` or ``"onnx"``.

    Raises:
        RuntimeError: where ONNX has not what the model needs, or the file says something else than the model.
    """
    import torch

    class Probabilities(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.head = student, head

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if released == "head":
                return self.head(images)
            found: torch.Tensor = self.student.outputs.probabilities(self.student(images))
            return found if released == "student" else (found + self.head(images)) / 2

    settings = student.hparams
    shape = (int(settings["in_channels"]), int(settings["image_size"]), int(settings["image_size"]))
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    module = Probabilities().eval()
    whole = head is None and student.extractor is None
    at_once = len(images) if whole else 1
    batch = {"images": {0: torch.export.Dim("batch", min=1)}} if whole else None
    with torch.inference_mode(False), torch.no_grad():
        wanted = module(images)
        program = torch.export.export(module, (images[:at_once],), dynamic_shapes=batch)
        if kind == "torch":
            path = output / "model.pt2"
            with (
                warnings.catch_warnings()
            ):  # of memory that tensors share; a loss would show in the comparison below
                warnings.filterwarnings("ignore", message="No complete tensor found in the group")
                torch.export.save(program, path)
            written = torch.export.load(path).module()
            said = torch.cat([written(part) for part in images.split(at_once)])
        else:
            path = output / "model.onnx"
            said = _through_onnx(program, path, images.split(at_once))
    if not torch.allclose(said, wanted, atol=_TOLERANCE):
        path.unlink()
        raise RuntimeError(
            f"{path.name} differs from the model by {(said - wanted).abs().max():.2g}; not written"
        )
    return path


def _through_onnx(program: Any, path: Path, parts: Sequence[Any]) -> Any:
    """Write a program as ONNX; what the file says of batches."""
    import onnxruntime
    import torch

    # ONNX has no hypot.
    table = {
        **torch.export.default_decompositions(),
        torch.ops.aten.hypot.default: lambda x, y: (x * x + y * y).sqrt(),
    }
    try:
        torch.onnx.export(program.run_decompositions(table), f=str(path), external_data=False, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        found = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
        what = found[1] if found else "an operation of this model"
        raise RuntimeError(f"--format onnx: ONNX has nothing for {what}; use --format torch") from error
    session = onnxruntime.InferenceSession(str(path))
    name = session.get_inputs()[0].name
    return torch.cat([torch.from_numpy(session.run(None, {name: part.numpy()})[0]) for part in parts])


_ONNX = ("onnx", "onnxscript", "onnxruntime")
