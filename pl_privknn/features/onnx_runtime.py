"""Frozen networks on ONNX Runtime: on a processor several times as fast as torch, with the same vectors."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pl_privknn._checks import check_installed
from pl_privknn.neighbors.search import in_threads

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
    """A session of ONNX Runtime on the CPU, with so many threads an operator; as many as torch has by default."""
    check_installed("a network in an .onnx file", "onnx", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    # Threads that wait actively would slow down whatever else the processor has to do.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _exported(network: nn.Module, example: Tensor) -> bytes:
    """The network as an ONNX model, by torch's exporter that traces: it takes a tenth of the newer one's time."""
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
    """Write a file of the cache, whole or not at all; without a place to write, the next process exports again."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
