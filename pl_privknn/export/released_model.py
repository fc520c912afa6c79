"""Export of a released model as one file that does not need this package, with its privacy card."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pl_privknn._checks import check_installed
from pl_privknn.callbacks.loggers import PublicPictures
from pl_privknn.config import build, known_class
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features.text import WordLlamaFeatures
from pl_privknn.networks.base import network_arguments
from pl_privknn.privacy.card import audited, has_teacher, privacy_card, write_card
from pl_privknn.privacy.verify import CHECKPOINT, COLUMNS, EXPORT, HEAD, mapping_of, reading
from pl_privknn.students.base import Student
from pl_privknn.students.losses import TASKS

_ONNX = ("onnx", "onnxscript", "onnxruntime")
#: Conversion of image files to model inputs, as by :class:`~pl_privknn.datamodules.ImageFolderDataModule`.
RESIZE = (
    "turn upright (EXIF), put on white where transparent, cut 16 bits to 8, convert to grey (1 channel) or RGB (3 "
    "channels), stretch to width and height by Pillow's BILINEAR; divide by 255 for float32"
)
_RANGES = {"float32": [0, 1], "uint8": [0, 255]}
# Largest difference of a probability between the student and the exported file.
_TOLERANCE = 1e-4


def export_run(
    run: str | Path,
    output: str | Path,
    format: str = "torch",
    *,
    module: torch.nn.Module | None = None,
    data: PrivatePublicDataModule | None = None,
) -> Path:
    """Audit a run, export its released model, compare the file with the run's model, and write a privacy card.

    For a network that is not a student of this package, such as one of ``PrivateTraining``, the weights are written,
    or the model where ``module`` is given. Only classes of this package are imported from the configuration.

    Args:
        run: folder of a finished run.
        output: folder for the files.
        format: ``"torch"`` (torch.export's .pt2) or ``"onnx"``; weights are always a ``.pt`` file.
        module: the run's network, where it is not a student of this package: from images, float32 ``(n, c, h, w)`` in
            0 … 1, to logits. A copy is loaded with the weights of the run's last checkpoint.
        data: with ``module``, the data module, which states the shape of the images and the classes.

    Returns:
        The model's file, which maps its input to probabilities, float ``(n, classes)``. ``model.json``, among the
        ``extra_files`` of ``torch.export.load`` or in the ``custom_metadata_map`` of an ONNX session, is the
        description of :class:`ReleasedModel`; of texts ``tokenizer.json`` is there as well.

    Raises:
        FileNotFoundError: where the folder holds no finished run.
        ValueError: for a student of another package, which must be exported from Python, or a run whose audit fails.
        ImportError: for ``"onnx"`` where a package of that extra is not installed.
        RuntimeError: where ONNX lacks an operation of the model, or the file's outputs differ from the model's.
    """
    run, output = Path(run), Path(output)
    if (module is None) != (data is None):
        raise ValueError(
            "module and data must be given together; give both, or neither for a student of this package"
        )
    if format == "onnx":
        check_installed("--format onnx", "onnx", *_ONNX)
        if not hasattr(torch.export, "default_decompositions"):
            raise RuntimeError(
                f"--format onnx: torch {torch.__version__} is too old; update it, or use --format torch"
            )
    if output.resolve() == run.resolve():
        raise ValueError(
            f"--output {output} is the run's own folder; name another, or leave it out for its subfolder {EXPORT}"
        )
    with reading(run):
        _checkpoint(run)
        card = None if audited(run) is None else privacy_card(run)
        model = released_model(run, None if module is None or data is None else (module, data))
    output.mkdir(parents=True, exist_ok=True)
    if model is None:
        path = _weights(_checkpoint(run), output)
    else:
        path = output / ("model.pt2" if format == "torch" else "model.onnx")
        _write(model, path)
    shutil.copyfile(run / "summary.json", output / "summary.json")
    if card is not None:
        write_card(card, output)
    return path


@dataclasses.dataclass(frozen=True)
class ReleasedModel:
    """Released model of a run, with the description its users need.

    Attributes:
        model: maps the input to probabilities, float32 ``(n, classes)``. The input is ``(n, c, h, w)`` of images,
            uint8 or float32 in 0 … 1 (other values raise an error, or give NaN in an ONNX file, which takes only
            float32); float32 ``(n, d)`` of vectors; or token numbers, int64 ``(1, t)``, of texts that
            :class:`~pl_privknn.features.WordLlamaFeatures` embedded by name of the configuration.
        about: ``input`` (``images``, ``vectors``, ``texts`` or ``rows``), ``shape`` of one input, ``batch`` (n:
            ``any``; 1 with a head or an extractor), ``range`` of each type and ``resize`` of images, ``column`` of
            tables, ``columns`` of rows (see :class:`~pl_privknn.datamodules.schema.Schema`), ``task``, ``classes``
            (names in the order of the probabilities), ``epsilon``, ``delta``, ``unit`` and ``guarantee``.
        tokenizer: the text of ``tokenizer.json``; empty unless inputs are texts.
        inner: the model on the examples of the run's data module; None for a file.

    Example:
        >>> import torch
        >>> released = ReleasedModel(torch.nn.Softmax(dim=1), {"input": "vectors", "shape": [2]})
        >>> released.files()
        {'model.json': '{"input": "vectors", "shape": [2]}'}
    """

    model: Callable[[torch.Tensor], torch.Tensor]
    about: dict[str, Any]
    tokenizer: str = ""
    inner: torch.nn.Module | None = None

    def files(self) -> dict[str, str]:
        """Text files embedded in the exported file, by name."""
        files = {"model.json": json.dumps(self.about, ensure_ascii=False)}
        return {**files, "tokenizer.json": self.tokenizer} if self.tokenizer else files


def released_model(
    run: Path, own: tuple[torch.nn.Module, PrivatePublicDataModule] | None = None
) -> ReleasedModel | None:
    """Released model of a finished run; None for a network that is not a student of this package.

    Args:
        run: its folder.
        own: network and data module of such a run; see :func:`export_run`.

    Raises:
        FileNotFoundError: where the folder holds no finished run.
        ValueError: for a student of another package.
    """
    checkpoint, settings = _checkpoint(run), mapping_of(run / "config.yaml")
    student: Any
    if own is None:
        student, arguments = _student(run, checkpoint, settings)
    else:
        student, arguments = _OwnStudent(*own, checkpoint), network_arguments(own[1].image_shape)
    labeling = settings.get("labeling") or {}
    if student is None:
        return None
    summary = mapping_of(run / "summary.json")
    released = str(summary.get("released") or labeling.get("released") or "student")
    inner = _ClassProbabilities(
        student, None if released == "student" else _head(run, labeling), released
    ).eval()
    size, given = arguments["image_size"], (settings.get("data") or {}).get("init_args") or {}
    height, width = (size, size) if isinstance(size, int) else map(int, size)
    shape = [int(arguments["in_channels"]), height, width]
    pictures, whole = PublicPictures.read(run), inner.head is None and student.extractor is None
    names = map(str, range(student.num_classes)) if pictures is None else pictures.class_names
    names = names if own is None else own[1].class_names
    about: dict[str, Any] = {
        "input": "images",
        "shape": shape,
        "batch": "any" if whole else 1,
        "task": student.task,
        "classes": list(names),
        **{name: summary.get(name) for name in ("epsilon", "delta", "unit", "guarantee")},
    }
    if (text := _token_vectors(settings, pictures)) is not None:
        about |= {"input": "texts", "shape": ["tokens"], "batch": 1, "column": given.get("text", "text")}
        return ReleasedModel(_OfTokens(inner, text.table), about, text.tokenizer_json, inner)
    if (run / COLUMNS).is_file():
        columns = json.loads((run / COLUMNS).read_text(encoding="utf-8"))
        about |= {"input": "rows", "shape": shape[:1], "columns": columns}
        return ReleasedModel(inner, about, inner=inner)
    if shape[1:] == [1, 1]:
        about |= {"input": "vectors", "shape": shape[:1], "column": given.get("text", "text")}
        return ReleasedModel(inner, about, inner=inner)
    return ReleasedModel(_OfImages(inner), {**about, "range": _RANGES, "resize": RESIZE}, inner=inner)


def _checkpoint(run: Path) -> Path:
    """Last checkpoint of a finished run, or its only one."""
    for name in ("config.yaml", "summary.json"):
        if not (run / name).is_file():
            raise FileNotFoundError(f"{run}: there is no {name}; give the folder of a finished run")
    found = [path for path in (*run.glob("checkpoints/*.ckpt"), *run.glob("*.ckpt")) if path.is_file()]
    if run / CHECKPOINT not in found and len(found) != 1:
        raise FileNotFoundError(f"{run}: there is no {CHECKPOINT}; give the folder of a finished run")
    return run / CHECKPOINT if run / CHECKPOINT in found else found[0]


def _weights(checkpoint: Path, output: Path) -> Path:
    """Write the weights of a checkpoint, without other state."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()):
        raise ValueError(
            f"{checkpoint}: its state_dict holds values that are not tensors; name the checkpoint of a network"
        )
    torch.save(dict(state), output / "model.pt")
    return output / "model.pt"


def _student(run: Path, checkpoint: Path, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Student of a run, from its configuration and last checkpoint, and its arguments.

    The student is None for a network of another kind.
    """
    model = settings.get("model") or {}
    found = known_class(str(model.get("class_path")))
    if found is None or not issubclass(found, Student):
        if not has_teacher(run, settings):
            return None, {}
        raise ValueError(
            f"model.class_path={model.get('class_path')} is not a student of this package; export it from Python: "
            "export_run(run, output, module=..., data=...)"
        )
    section = (model.get("init_args") or {}).get("extractor")
    given = {}
    if section is not None:  # checkpoints hold only what it learned
        (labeling,) = build({"labeling": {"features": [section]}}, own_code=False).callbacks
        given["extractor"] = labeling.features[0]
    # As load_from_checkpoint does, which takes the import of Lightning.
    contents = torch.load(checkpoint, map_location="cpu", weights_only=True)
    saved = contents["hyper_parameters"]
    arguments = {name: value for name, value in saved.items() if not name.startswith("_")}  # of LightningCLI
    student = found(**arguments, **given)
    student.on_load_checkpoint(contents)
    student.load_state_dict(contents["state_dict"])
    return student.eval(), arguments


class _OwnStudent(torch.nn.Module):
    """User's own network with the weights of a checkpoint, and the attributes that an export needs."""

    extractor = None

    def __init__(self, module: torch.nn.Module, data: PrivatePublicDataModule, checkpoint: Path) -> None:
        super().__init__()
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
        self.module = copy.deepcopy(module).cpu().eval()
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"module: its parameters do not match {checkpoint}; give the run's network"
            ) from error
        self.outputs, self.task, self.num_classes = TASKS[data.task], data.task, data.num_classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(images)
        return logits


def _head(run: Path, section: dict[str, Any]) -> Any:
    """Teacher's own model of a run, from its configuration and ``head.pt``."""
    (labeling,) = build({"labeling": section}, own_code=False).callbacks
    if (head := labeling.load_head(run)) is None:
        raise FileNotFoundError(f"{run}: the run released its head, but {HEAD} is missing; restore it")
    return head.eval()


class _ClassProbabilities(torch.nn.Module):
    """Model of the probabilities of student, head, or their mean."""

    def __init__(self, student: Any, head: Any, released: str) -> None:
        super().__init__()
        self.student, self.head, self.released = student, head, released

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.released == "head":
            return self.head(images)
        found: torch.Tensor = self.student.outputs.probabilities(self.student(images))
        return found if self.released == "student" else (found + self.head(images)) / 2


def _token_vectors(settings: dict[str, Any], pictures: PublicPictures | None) -> WordLlamaFeatures | None:
    """Extractor of a run's texts, where it can be exported."""
    section = ((settings.get("data") or {}).get("init_args") or {}).get("features")
    if section is None and pictures is not None and (pictures.texts or pictures.tested_texts):
        return WordLlamaFeatures()  # the default of TextDataModule
    named = section.get("class_path") if isinstance(section, dict) else section
    if known_class(str(named)) is not WordLlamaFeatures:
        return None
    return WordLlamaFeatures(**(section.get("init_args") or {} if isinstance(section, dict) else {}))


class _OfImages(torch.nn.Module):
    """Model of images, uint8 or floats, that rejects floats outside 0 … 1."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # A traced graph can't branch on the type: 0 - 1 is 255 in uint8, and -1 in floats. float64 fails in to().
        images = (images / (images[:1, :1, :1, :1] * 0 - 1).abs()).to(torch.float32)
        inside = ((images >= 0) & (images <= 1)).all()
        torch._assert_async(inside, "images: expected uint8, or floats in 0 … 1; divide 0 … 255 by 255")
        return torch.where(inside, self.model(images), torch.nan)  # ONNX has no assertions


class _OfTokens(torch.nn.Module):
    """Model of token ids, by a model of mean token vectors."""

    table: torch.Tensor

    def __init__(self, model: torch.nn.Module, table: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("table", table.half())  # as it came

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.clamp(max=len(self.table) - 1)
        found: torch.Tensor = self.model(self.table[tokens].float().mean(1))
        return found


def _write(released: ReleasedModel, path: Path) -> None:
    """Export a model to a file, and compare the file's outputs with the model's."""
    generator, about, model = torch.Generator().manual_seed(0), released.about, released.model
    assert isinstance(model, torch.nn.Module)
    sizes: dict[str, Any] | None = None
    if about["input"] == "images" and path.suffix == ".onnx":  # whose inputs have one type
        about["range"] = {"float32": [0, 1]}
    if isinstance(model, _OfTokens):
        lengths = (5, 300, 1)
        parts = tuple(torch.randint(len(model.table), (1, length), generator=generator) for length in lengths)
        sizes = {"tokens": {1: torch.export.Dim("length", min=1)}}
    else:
        parts = torch.rand(3, *about["shape"], generator=generator).split(3 if about["batch"] == "any" else 1)
        if about["batch"] == "any":
            sizes = {about["input"]: {0: torch.export.Dim("batch", min=1)}}
    with torch.inference_mode(False), torch.no_grad():
        wanted = torch.cat([model(part) for part in parts])
        program = torch.export.export(model, (parts[0],), dynamic_shapes=sizes)
        write = _through_torch if path.suffix == ".pt2" else _through_onnx
        found = write(program, path, parts, released.files())
    if not torch.allclose(found, wanted, atol=_TOLERANCE):
        path.unlink()
        raise RuntimeError(
            f"{path.name} differs from the model by {(found - wanted).abs().max():.2g} and was not written; use "
            "another format"
        )


def _through_torch(program: Any, path: Path, parts: Sequence[Any], files: dict[str, str]) -> Any:
    """Write a program with torch.export; returns the file's outputs for batches."""
    with warnings.catch_warnings():  # about shared memory of tensors; a loss would show in the file's outputs
        warnings.filterwarnings("ignore", message="No complete tensor found in the group")
        torch.export.save(program, path, extra_files=files)
    written = torch.export.load(path).module()
    return torch.cat([written(part) for part in parts])


def _through_onnx(program: Any, path: Path, parts: Sequence[Any], files: dict[str, str]) -> Any:
    """Write a program as ONNX; returns the file's outputs for batches."""
    import onnx
    import onnxruntime

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
        raise RuntimeError(f"--format onnx: ONNX does not support {what}; use --format torch") from error
    model = onnx.load(path)
    onnx.helper.set_model_props(model, files)
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(str(path))
    name = session.get_inputs()[0].name
    return torch.cat([torch.from_numpy(session.run(None, {name: part.numpy()})[0]) for part in parts])
