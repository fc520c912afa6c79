"""Extractors of texts: WordLlama's table against its own package, and sentence-transformers models as ONNX files."""

import importlib
import json
import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pl_privknn.features import SentenceFeatures, WordLlamaFeatures

TEXTS = ["Rates rise again", "Ein spätes Tor: 2-1!", "x " * 3000, "日本"]


@pytest.fixture
def word_llama(monkeypatch):
    monkeypatch.setattr(
        logging, "basicConfig", lambda **arguments: None
    )  # of the whole process, at its import
    return importlib.import_module("wordllama")


@pytest.mark.parametrize("dimensions", [64, 256])
def test_word_llama_is_its_package(dimensions, word_llama):
    folder = Path(word_llama.__file__).parent
    model = word_llama.WordLlama.load(cache_dir=folder, trunc_dim=dimensions, disable_download=True)
    theirs = model.embed(TEXTS)
    ours = WordLlamaFeatures(dimensions)(TEXTS)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)


def test_a_text_has_one_vector_whatever_stands_beside_it():
    extract = WordLlamaFeatures()
    alone = torch.cat([extract([text]) for text in TEXTS])
    assert torch.equal(extract(TEXTS), alone)
    assert extract([]).shape == (0, 256)


# ---------------------------------------------------------------------------- sentence-transformers

WORDS = ["[UNK]", "[CLS]", "[SEP]", "rates", "rise", "again"]


def sentence_model(folder, mode="mean", steps=("Transformer", "Pooling", "Normalize")):
    """A model in the files of sentence-transformers: token vectors are rows of a table, scaled by the mask."""
    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.random.default_rng(0).normal(size=(len(WORDS), 3)).astype(np.float32)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1, "t"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [1, "t", 3])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["last_hidden_state"]),
    ]
    constants = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([2]), "last")]
    graph = helper.make_graph(nodes, "model", inputs, [output], constants)
    (folder / "onnx").mkdir()
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, folder / "onnx" / "model.onnx")
    modules = [{"idx": n, "type": f"sentence_transformers.models.{step}"} for n, step in enumerate(steps)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    (folder / "1_Pooling").mkdir()
    kinds = {"pooling_mode_cls_token": mode == "cls", "pooling_mode_mean_tokens": mode == "mean"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(kinds))
    return table


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_models_as_onnx(tmp_path, mode, normalize):
    steps = ("Transformer", "Pooling", "Normalize")[: 2 + normalize]
    table = sentence_model(tmp_path / "model", mode, steps)
    found = SentenceFeatures(tmp_path / "model", backend="onnx")(
        ["rates rise", "again again again again", "elsewhere"]
    )
    tokens = [[1, 3, 4, 2], [1, 5, 5, 2], [1, 0, 2]]  # no more than four of a text
    wanted = np.stack([table[row].mean(0) if mode == "mean" else table[1] for row in tokens])
    if normalize:
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)


def test_models_that_are_none(tmp_path):
    sentence_model(tmp_path / "dense", steps=("Transformer", "Pooling", "Dense"))
    sentence_model(tmp_path / "bare")
    (tmp_path / "bare" / "onnx" / "model.onnx").unlink()
    for folder, words in {
        ".": r"there is no modules\.json",
        "dense": r"steps Transformer, Pooling, Dense .* use backend='torch'",
        "bare": r"there is no onnx/model\.onnx",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            SentenceFeatures(tmp_path / folder, backend="onnx")
    with pytest.raises(ValueError, match="dimensions=100 must be 64, 128 or 256"):
        WordLlamaFeatures(100)
