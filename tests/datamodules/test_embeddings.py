"""Tables of embeddings: every kind of file gives the same data, and a run on them works."""

import sys

import numpy as np
import pytest
import torch

from pl_privknn.datamodules import EmbeddingsDataModule


def _parts(dimension=6):
    rng = np.random.default_rng(0)
    parts = {}
    for part, count in (("private", 120), ("public", 40), ("test", 20)):
        labels = np.arange(count) % 3
        parts[part] = (
            (np.eye(dimension)[labels] + 0.2 * rng.normal(size=(count, dimension))).astype(np.float32),
            labels,
        )
    return parts


def _arguments(parts):
    return {
        "private_embeddings": parts["private"][0], "private_labels": parts["private"][1],
        "public_embeddings": parts["public"][0], "public_truth": parts["public"][1],
        "test_embeddings": parts["test"][0], "test_labels": parts["test"][1],
    }  # fmt: skip


def _assert_holds(data, parts):
    data.setup("fit")
    assert data.image_shape == (6, 1, 1)
    for part in ("private", "public", "test"):
        images = getattr(data, part).images()
        assert images.dtype == torch.float32
        np.testing.assert_allclose(torch.nn.Flatten()(images).numpy(), parts[part][0], rtol=1e-6)
    np.testing.assert_array_equal(data.private.labels, parts["private"][1])
    np.testing.assert_array_equal(data.public.truth, parts["public"][1])
    np.testing.assert_array_equal(data.test.labels, parts["test"][1])


def test_arrays_and_files_give_the_same(tmp_path):
    parts = _parts()
    arguments = _arguments(parts)
    _assert_holds(EmbeddingsDataModule(**arguments, num_classes=3), parts)
    for name, array in arguments.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = {name: tmp_path / f"{name}.npy" for name in arguments}
    _assert_holds(EmbeddingsDataModule(**files, num_classes=3), parts)
    np.savez(tmp_path / "all.npz", **arguments)
    _assert_holds(
        EmbeddingsDataModule(**dict.fromkeys(arguments, tmp_path / "all.npz"), num_classes=3), parts
    )
    np.savez(tmp_path / "other.npz", x=arguments["private_embeddings"].astype(np.float64), y=np.arange(2))
    named = {**files, "private_embeddings": f"{tmp_path}/other.npz:x", "private_labels": list(range(3)) * 40}
    _assert_holds(EmbeddingsDataModule(**named, num_classes=3), parts)


@pytest.mark.parametrize("tested", [True, False])
def test_attributes_are_rows_of_labels(tmp_path, tested):
    parts = {name: (rows, np.eye(3, dtype=np.int64)[labels]) for name, (rows, labels) in _parts().items()}
    folder = tmp_path / "labels"
    folder.mkdir()
    for number, some in enumerate(np.split(parts["private"][1], [70])):
        np.save(folder / f"{number}.npy", some)
    arguments = {**_arguments(parts), "private_labels": folder}
    if not tested:
        arguments["test_embeddings"] = arguments["test_labels"] = None
        parts["test"] = np.empty((0, 6), np.float32), np.empty((0, 3), np.int64)
    _assert_holds(EmbeddingsDataModule(**arguments, num_classes=3, task="multilabel"), parts)


def test_parquet_gives_the_same(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parts = _parts()
    for part, (rows, labels) in parts.items():
        table = pyarrow.table({"embedding": list(rows), "label": labels, "text": [""] * len(rows)})
        parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=7)
    files = {
        name: f"{tmp_path}/{name.split('_')[0]}.parquet:{'embedding' if 'emb' in name else 'label'}"
        for name in _arguments(parts)
    }
    _assert_holds(EmbeddingsDataModule(**files, num_classes=3), parts)
    with pytest.raises(ValueError, match="no column 'private_embeddings'"):
        EmbeddingsDataModule(**{**files, "private_embeddings": tmp_path / "private.parquet"}, num_classes=3)
    ragged = pyarrow.table({"embedding": [[1.0] * 6, [3.0]]})
    parquet.write_table(ragged, tmp_path / "ragged.parquet")
    data = EmbeddingsDataModule(
        **{**files, "private_embeddings": f"{tmp_path}/ragged.parquet:embedding"}, num_classes=3
    )
    with pytest.raises(ValueError, match="differ in length"):
        data.setup("fit")


def test_parquet_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"pip install 'pl-privknn\[parquet\]', or write a"):
        EmbeddingsDataModule(f"{tmp_path}/a.parquet:x", [0], np.zeros((1, 2)), num_classes=2)
    with pytest.raises(FileNotFoundError, match=r"b\.parquet"):
        EmbeddingsDataModule(f"{tmp_path}/b.parquet:x", [0], np.zeros((1, 2)), num_classes=2)


def test_bad_tables_are_refused_without_showing_values():
    parts = _parts()
    good = _arguments(parts)
    with pytest.raises(ValueError, match="private_embeddings: 5 numbers a record"):
        EmbeddingsDataModule(**{**good, "private_embeddings": np.zeros((120, 5), np.float32)}, num_classes=3)
    with pytest.raises(ValueError, match=r"public_embeddings: shape \(n, 6, 1\)"):
        EmbeddingsDataModule(**{**good, "public_embeddings": parts["public"][0][..., None]}, num_classes=3)
    with pytest.raises(ValueError, match="go together"):
        EmbeddingsDataModule(**{**good, "test_labels": None}, num_classes=3)
    bad = parts["private"][0].copy()
    bad[7, 2] = np.nan
    with pytest.raises(ValueError, match="private_embeddings: some values are NaN"):
        EmbeddingsDataModule(**{**good, "private_embeddings": bad}, num_classes=3).setup("fit")
    whole = np.ones((120, 6), np.int64)
    with pytest.raises(ValueError, match="want float"):
        EmbeddingsDataModule(**{**good, "private_embeddings": whole}, num_classes=3).setup("fit")
    with pytest.raises(ValueError, match="private_labels"):
        EmbeddingsDataModule(**{**good, "private_labels": [0, 1]}, num_classes=3).setup("fit")
    data = EmbeddingsDataModule(**{**good, "test_embeddings": None, "test_labels": None}, num_classes=3)
    data.setup("fit")
    assert len(data.test) == 0


def test_a_student_learns_from_answers_about_embeddings(tmp_path):
    import pytorch_lightning as pl

    from pl_privknn.callbacks import PrivateLabeler
    from pl_privknn.labelers.ind_knn.labeler import IndKNN
    from pl_privknn.networks import FeatureNetwork
    from pl_privknn.students import SupervisedStudent

    data = EmbeddingsDataModule(**_arguments(_parts()), num_classes=3, batch_size=8)
    labeling = PrivateLabeler(
        IndKNN(0.6, 0.4, epsilon=8.0, num_queries=40),
        queries_per_round=40,
        query_batch_size=40,
        features=torch.nn.Flatten(),
        progress=False,
        files={"run_dir": tmp_path},
    )
    network = FeatureNetwork(torch.nn.Flatten(), 6, 3)
    trainer = pl.Trainer(
        max_epochs=15, accelerator="cpu", logger=False, callbacks=[labeling], default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    student = SupervisedStudent(network=network, num_classes=3, optimization={"lr": 0.05})
    trainer.fit(student, data)
    (metrics,) = trainer.test(student, data, verbose=False)
    assert metrics["test/accuracy"] > 0.8
