"""Text extractors: models with weights in local files, each text on its own."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_choice, check_installed, check_path, shown
from pl_privknn.config import HasInitArguments
from pl_privknn.features.pretrained import session_of

_TEXTS_AT_ONCE = 64
_WIDTHS = (64, 128, 256)
_BACKENDS = ("torch", "onnx")
# Steps of a sentence-transformers model that are done here where its network is an ONNX file.
_STEPS = ("Transformer", "Pooling", "Normalize")


class TextExtractor(HasInitArguments, abc.ABC):
    """Maps texts to ``(n, d)`` float32.

    A text's vector never depends on another text, private or public, and nothing is learned from the texts that are
    given. What an extractor was trained on must be public.
    """

    @abc.abstractmethod
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Vectors of texts, float32 ``(n, d)`` on the CPU."""


class WordLlamaFeatures(TextExtractor):
    """The mean of a text's token vectors, from a table of the language model Llama 2 (WordLlama, Miller 2024).

    Weights of 16 MB and the tokenizer come with the package ``wordllama``; nothing is downloaded. One core embeds
    some 600 news articles a second.

    Args:
        dimensions: 64, 128 or 256 numbers a text; the table was trained so that its first columns serve alone.

    Raises:
        ImportError: where ``wordllama`` is not installed.
        ValueError: for other dimensions.

    Example:
        >>> from pl_privknn.features import WordLlamaFeatures
        >>> WordLlamaFeatures()(["Rates rise again", "A late goal"]).shape
        torch.Size([2, 256])
    """

    def __init__(self, dimensions: int = 256) -> None:
        if dimensions not in _WIDTHS:
            raise ValueError(f"dimensions={shown(dimensions)} must be 64, 128 or 256")
        self.dimensions = int(dimensions)
        check_installed("WordLlamaFeatures", "text", "wordllama", "tokenizers", "safetensors")
        # Not imported: it sets up logging for the whole process.
        spec: Any = importlib.util.find_spec("wordllama")
        folder = Path(spec.origin).parent
        self.tokenizer_json = (folder / "tokenizers" / "l2_supercat_tokenizer_config.json").read_text("utf-8")
        self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_str(self.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        read: Any = importlib.import_module("safetensors.torch").load_file
        table = read(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
        self.table: Tensor = table[:, : self.dimensions].float().contiguous()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """See :meth:`TextExtractor.__call__`."""
        parts = [torch.empty(0, self.dimensions)]
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            some = list(texts[start : start + _TEXTS_AT_ONCE])
            tokens = [found.ids for found in self._tokenizer.encode_batch(some, add_special_tokens=False)]
            ends = torch.tensor([0, *map(len, tokens)]).cumsum(0)
            flat = torch.tensor([token for found in tokens for token in found], dtype=torch.int64)
            parts.append(
                torch.nn.functional.embedding_bag(
                    flat.clamp(max=len(self.table) - 1), self.table, ends[:-1], mode="mean"
                )
            )
        return torch.cat(parts)


class SentenceFeatures(TextExtractor):
    """A sentence-transformers model in a local folder. Nothing is ever downloaded, and no code in the folder is run.

    Each text goes through the model alone: padding, and the scales of quantised layers, would otherwise depend on
    the other texts of the batch.

    Args:
        folder: holds ``modules.json``, as ``SentenceTransformer.save`` writes it.
        backend: ``"torch"`` (the package sentence-transformers) or ``"onnx"``: ``onnx/model.onnx`` or ``model.onnx``
            through onnxruntime, of models that end in mean or first-token pooling, with or without scaling to unit
            length.
        device: where torch runs; the CPU by default.

    Raises:
        FileNotFoundError: where the folder is no such model's.
        ImportError: where the package of the backend is not installed.
        ValueError: for an ONNX model with further steps.
    """

    def __init__(self, folder: str | Path, backend: str = "torch", device: str | None = None) -> None:
        self.folder, self.backend = (
            Path(check_path("folder", folder)),
            check_choice("backend", backend, _BACKENDS),
        )
        if not (self.folder / "modules.json").is_file():
            raise FileNotFoundError(
                f"folder={str(folder)!r}: there is no modules.json; expected the folder of a sentence-transformers "
                "model"
            )
        package = "sentence_transformers" if backend == "torch" else "tokenizers"
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"backend={backend!r} needs a package; pip install {package.replace('_', '-')}")
        if backend == "torch":
            made: Any = importlib.import_module("sentence_transformers").SentenceTransformer
            self._model = made(str(self.folder), device=device or "cpu", local_files_only=True)
        else:
            self._open_onnx()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """See :meth:`TextExtractor.__call__`."""
        one = self._of_torch if self.backend == "torch" else self._of_onnx
        return torch.stack([one(text) for text in texts]) if len(texts) else one("")[None][:0]

    def _of_torch(self, text: str) -> Tensor:
        found: Tensor = self._model.encode([text], convert_to_tensor=True, show_progress_bar=False)[0]
        return found.float().cpu()

    def _open_onnx(self) -> None:
        steps = [str(step["type"]).rpartition(".")[2] for step in self._read("modules.json")]
        pooling = self._read("1_Pooling/config.json")
        mode = pooling.get("pooling_mode") or next(
            (
                name
                for name in ("mean", "cls")
                if pooling.get(f"pooling_mode_{name}_token{'s' * (name == 'mean')}")
            ),
            None,
        )
        if mode not in ("mean", "cls") or not set(steps) <= set(_STEPS):
            raise ValueError(
                f"folder={str(self.folder)!r}: steps {', '.join(steps)} with pooling {mode}; backend='onnx' knows "
                f"{', '.join(_STEPS)} with pooling mean or cls; use backend='torch'"
            )
        self._mean, self._unit = mode == "mean", "Normalize" in steps
        files = [self.folder / name for name in ("onnx/model.onnx", "model.onnx")]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise FileNotFoundError(
                f"folder={str(self.folder)!r}: there is no onnx/model.onnx, nor model.onnx"
            )
        self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
            str(self.folder / "tokenizer.json")
        )
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(int(self._read("sentence_bert_config.json")["max_seq_length"]))
        self._session = session_of(file.read_bytes())

    def _of_onnx(self, text: str) -> Tensor:
        ids = np.array([self._tokenizer.encode(text).ids], dtype=np.int64)
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        given = {each.name: known[each.name] for each in self._session.get_inputs()}
        tokens = torch.from_numpy(self._session.run(None, given)[0])[0].float()
        vector = tokens.mean(0) if self._mean else tokens[0]
        return torch.nn.functional.normalize(vector, dim=0) if self._unit else vector

    def _read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))
