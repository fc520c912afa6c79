"""Predictions with class names, from a run or its exported file."""

from __future__ import annotations

import csv
import dataclasses
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_privknn.config import build, known_class
from pl_privknn.datamodules.array_files import Array
from pl_privknn.datamodules.arrays import images_in
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.columns import TABLES, Columns
from pl_privknn.datamodules.datasets import TensorImages
from pl_privknn.datamodules.folder import FileImages, images_under
from pl_privknn.datamodules.schema import Schema
from pl_privknn.export.released_model import ReleasedModel, released_model
from pl_privknn.features.pretrained import session_of
from pl_privknn.privacy.verify import mapping_of
from pl_privknn.privacy.verify import reading as reading_run

_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Class probabilities of inputs, with the names of the classes.

    Attributes:
        names: of the inputs: files, or numbers of rows from 0.
        probabilities: float32 ``(n, classes)``, on the CPU.
        class_names: names of the classes, or of the attributes.
        task: ``"multiclass"`` or ``"multilabel"``.

    Example:
        >>> found = Predictions(("0", "1"), torch.tensor([[0.9, 0.1], [0.25, 0.75]]), ("cat", "dog"))
        >>> found.classes
        ['cat', 'dog']
        >>> found.rows()[1]
        ['1', 'dog', 0.75]
    """

    names: tuple[str, ...]
    probabilities: Tensor
    class_names: tuple[str, ...]
    task: str = "multiclass"

    @classmethod
    def of(cls, batches: Sequence[Any], data: PrivatePublicDataModule) -> Predictions:
        """Predictions from the result of ``trainer.predict(student, data)``.

        Args:
            batches: probabilities, float ``(b, classes)`` each.
            data: the data module, for the names of its classes.
        """
        found = torch.cat(list(batches)).float().cpu()
        return cls(tuple(map(str, range(len(found)))), found, data.class_names, data.task)

    @property
    def classes(self) -> list[str]:
        """Name of each input's most probable class; for attributes, the names above 0.5, joined by commas."""
        if self.task == "multilabel":
            rows = (self.probabilities > 0.5).tolist()
            named = (zip(self.class_names, row, strict=True) for row in rows)
            return [", ".join(name for name, on in pairs if on) or "none" for pairs in named]
        return [self.class_names[place] for place in self.probabilities.argmax(1).tolist()]

    def rows(self) -> list[list[Any]]:
        """Name, class and probability of each input; for attributes, all probabilities."""
        chosen = self.probabilities if self.task == "multilabel" else self.probabilities.amax(1, keepdim=True)
        parts = zip(self.names, self.classes, chosen.tolist(), strict=True)
        return [
            [name, class_name, *(round(value, 6) for value in values)] for name, class_name, values in parts
        ]

    def write(self, path: str | Path) -> None:
        """Write the rows as CSV in UTF-8, with the columns ``input``, ``class`` and ``probability``."""
        shown = self.class_names if self.task == "multilabel" else ("probability",)
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["input", "class", *shown], *self.rows()])


def predict(model: str | Path, inputs: Any = None, *, column: str | None = None) -> Predictions:
    """Predict classes with a run's released model. Post-processing: no further privacy cost.

    Args:
        model: folder of a finished run, or its exported ``.pt2`` or ``.onnx`` file.
        inputs: path, or list of paths: image files and folders of these; one table of texts or vectors; or one
            ``.npy`` array of images or vectors. None: the predict part of the run's data module, else its test part.
        column: column of a table; as in the run by default.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for an invalid model or invalid inputs.
    """
    found = open_model(model)
    if inputs is None:
        return _own_part(found, Path(model))
    given = [Path(path) for path in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    for path in given:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder; check the path")
    about, arrays = found.about, len(given) == 1 and given[0].suffix == ".npy"
    if about["input"] == "images" and not arrays:
        names, rows, store = _image_files(given, about["shape"])
    else:
        is_array = arrays and about["input"] not in ("texts", "rows")
        rows = _array(given[0], about) if is_array else _table(given, found, column)
        names, store = tuple(map(str, range(len(rows)))), None
    if not len(names):
        raise ValueError(f"{given[0]}: it contains no inputs to predict")
    if store is None and not isinstance(rows, list):
        bad = (~rows.flatten(1).isfinite().all(dim=1)).nonzero()
        if len(bad):
            raise ValueError(
                f"{given[0]}: input {int(bad[0])} holds NaN or infinite numbers; fill them in, or leave it out"
            )
    size = _AT_ONCE if about["batch"] == "any" else 1
    parts = rows if isinstance(rows, list) else rows.split(size)
    with torch.no_grad():
        probabilities = torch.cat(
            [found.model(part if store is None else store.read(part)) for part in parts]
        )
    if bool(probabilities.isnan().any()):
        raise ValueError(f"{given[0]}: expected floats in 0 … 1, or uint8; divide 0 … 255 by 255")
    return Predictions(names, probabilities.float(), tuple(about["classes"]), about["task"])


def open_model(path: str | Path) -> ReleasedModel:
    """Open the model of a finished run's folder, or an exported ``.pt2`` or ``.onnx`` file.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: for a file not written by ``privknn export``, or one with only weights.
    """
    path = Path(path)
    if path.is_dir():
        with reading_run(path):
            found = released_model(path)
        if found is None:
            raise ValueError(
                f"{path}: the run's network is not a student of this package; use Trainer.predict with its class"
            )
        return found
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such run or exported file; check the path")
    if path.suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"{path}: expected the folder of a run, or model.pt2 or model.onnx written by privknn export "
            "(a .pt file holds only weights)"
        )
    try:
        made, files = (_torch_file if path.suffix == ".pt2" else _onnx_file)(path)
        return ReleasedModel(made, json.loads(files["model.json"]), files.get("tokenizer.json", ""))
    except ImportError:
        raise
    except Exception as error:  # readers of damaged files raise many types
        raise ValueError(
            f"{path} is not a file of privknn export ({type(error).__name__}); export the run again"
        ) from error


def _torch_file(path: Path) -> tuple[Any, dict[str, str]]:
    with zipfile.ZipFile(path) as archive:  # torch's own messages take many lines
        names = {Path(name).name for name in archive.namelist()}
    files: dict[str, str] = {name: "" for name in ("model.json", "tokenizer.json") if name in names}
    if not files:
        raise KeyError("model.json")
    return torch.export.load(path, extra_files=files).module(), files


def _onnx_file(path: Path) -> tuple[Any, dict[str, str]]:
    session = session_of(path.read_bytes())
    name = session.get_inputs()[0].name
    model = lambda part: torch.from_numpy(session.run(None, {name: part.numpy()})[0])  # noqa: E731
    return model, session.get_modelmeta().custom_metadata_map


def _own_part(found: ReleasedModel, run: Path) -> Predictions:
    """Predictions for the predict part, or the test part, of a run's own data."""
    section = mapping_of(run / "config.yaml").get("data") if found.inner is not None else None
    made = known_class(str((section or {}).get("class_path")))
    if found.inner is None or section is None or made is None:
        raise ValueError(f"{run}: its configuration has no data to predict; name images, a table or an array")
    data = build({"data": section}, own_code=False).data
    if "columns" in found.about:
        data.take_columns(found.about["columns"])
    data.setup("predict")
    batches = [part for batch in data.predict_dataloader() for part in batch.split(_size_of(found))]
    if not batches:
        raise ValueError(
            f"{run}: the run's data have no predict or test part; name images, a table or an array"
        )
    with torch.no_grad():
        return Predictions.of([found.inner(batch) for batch in batches], data)


def _size_of(found: ReleasedModel) -> int:
    return _AT_ONCE if found.about["batch"] == "any" else 1


def _image_files(given: list[Path], shape: list[int]) -> tuple[tuple[str, ...], Tensor, FileImages]:
    """Names, positions and store of image files, including those in folders."""
    if shape[0] not in (1, 3):
        raise ValueError(
            f"{given[0]}: the model takes {shape[0]} channels, but image files have 1 or 3; give an .npy array"
        )
    files: list[Path] = []
    for path in given:
        images = images_under(path) if path.is_dir() else [path]
        if not images:
            raise ValueError(f"{path}: this folder contains no image; name images or folders of images")
        files += images
    channels, height, width = shape
    return (
        tuple(map(str, files)),
        torch.arange(len(files)),
        FileImages(files, (channels, height, width), cache=False),
    )


def _array(path: Path, about: dict[str, Any]) -> Tensor:
    """Images, float ``(n, c, h, w)``, or vectors, float ``(n, d)``, of an ``.npy`` file."""
    table, shape = Array(path.name, path), tuple(about["shape"])
    rows = table.numbers() if about["input"] == "images" else table.vectors()
    if about["input"] == "images":
        rows = TensorImages(images_in(path.name, rows)).read(torch.arange(len(rows)))
    if tuple(rows.shape[1:]) != shape:
        raise ValueError(f"{path}: inputs of shape {tuple(rows.shape[1:])}; expected {shape}")
    return rows.float()


def _table(given: list[Path], found: ReleasedModel, column: str | None) -> Any:
    """Token numbers of a table's texts, its vectors, or its rows."""
    path, name = given[0], column or found.about.get("column", "")
    if len(given) > 1 or path.suffix.lower() not in TABLES:
        raise ValueError(
            f"{path}: the model takes {found.about['input']}; give one table ({', '.join(TABLES)})"
        )
    if found.about["input"] == "rows":
        if column is not None:
            raise ValueError(f"--column {column}: the model takes rows of all its columns; leave it out")
        schema = Schema.of(found.about["columns"])
        return schema.scaled(schema.read(Columns("table", path, schema.names), "as in the run"))
    table = Columns("table", path, [name])
    table.check(name, "with --column")
    if found.about["input"] == "vectors":
        rows = table.vectors(name)
        if rows.shape[1:] != (found.about["shape"][0],):
            raise ValueError(
                f"{path}: expected vectors of dimension {found.about['shape'][0]}, as in the run"
            )
        return rows
    from tokenizers import Tokenizer

    texts = [text for some in table.texts(name) for text in some]
    if not all(text and not text.isspace() for text in texts):
        raise ValueError(f"{path}: some texts are empty; leave those rows out")
    tokenizer = Tokenizer.from_str(found.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids]) for text in texts]
