"""Private embeddings in one file a process."""

import types

import numpy as np
import pytest

from pl_privknn.datamodules import EmbeddingsDataModule
from pl_privknn.privacy.redaction import PrivateSideError
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.training.session import PrivateSession
from pl_privknn.training.settings import PoissonBatches, TrainingBudget

#: Records that are in every process.
TABLE = {"private_embeddings": np.ones((4, 3), np.float32), "private_labels": np.arange(4) % 2}


def write(folder, counts):
    generator = np.random.default_rng(0)
    for rank, count in enumerate(counts):
        np.save(folder / f"features-{rank:05d}.npy", generator.random((count, 3), np.float32))
        np.save(folder / f"labels-{rank:05d}.npy", np.arange(count) % 2 if count else np.zeros(0, np.int64))


def data_of(folder, rank=0, size=2, **named):
    names = {
        "private_embeddings": str(folder / "features-{rank:05d}.npy"),
        "private_labels": str(folder / "labels-{rank:05d}.npy"),
        **named,
    }
    data = EmbeddingsDataModule(**names, public_embeddings=np.ones((4, 3), np.float32), num_classes=2)
    data.trainer = types.SimpleNamespace(global_rank=rank, world_size=size)
    data.setup("fit")
    return data


def test_each_process_reads_its_own_file(tmp_path):
    write(tmp_path, [8, 8])  # with equal labels
    for rank, count in enumerate([8, 8]):
        data = data_of(tmp_path, rank)
        assert data.private_in_shards
        assert len(data.private) == count
        expected = np.load(tmp_path / f"features-{rank:05d}.npy")
        assert np.array_equal(data.private_images(0, count)[:, :, 0, 0].numpy(), expected)
    assert not EmbeddingsDataModule(
        np.ones((4, 3), np.float32), np.arange(4) % 2, np.ones((4, 3), np.float32), num_classes=2
    ).private_in_shards


def test_a_private_training_draws_from_all_of_a_process_s_own_records(tmp_path):
    write(tmp_path, [8, 8])
    alike = types.SimpleNamespace(broadcast=lambda value: value, reduce_boolean_decision=bool)
    trainer = types.SimpleNamespace(global_rank=1, world_size=2, strategy=alike)
    for data, wanted in ((data_of(tmp_path, 1), 8), (data_of(tmp_path, 1, **TABLE), 2)):
        batches = PoissonBatches(batch_size=2, expected_records=8)
        budget = TrainingBudget(noise_multiplier=1.0)
        session = PrivateSession("Test", batches, budget, RunFiles(), 1, None)
        session.draw_from(data, trainer)
        assert len(session.private.records) == wanted


def test_shards_that_are_missing_empty_doubled_or_left_over_are_named(tmp_path):
    write(tmp_path, [5, 8])
    with pytest.raises(
        FileNotFoundError, match=r"private_embeddings='.*features-00002.npy': there is no such shard"
    ):
        data_of(tmp_path, 2, 3)
    with pytest.raises(
        ValueError, match=r"private_embeddings='.*features-00001.npy': nobody would read this shard"
    ):
        data_of(tmp_path, 0, 1)
    write(tmp_path, [5, 0])
    with pytest.raises(ValueError, match=r"private_embeddings='.*features-00001.npy': the shard is empty"):
        data_of(tmp_path, 1)
    np.save(tmp_path / "features-00001.npy", np.load(tmp_path / "features-00000.npy"))
    for rank in range(2):
        said = rf"features-0000{rank}.npy' is the same as '.*features-0000{1 - rank}.npy'"
        with pytest.raises(ValueError, match=said):
            data_of(tmp_path, rank)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"private_labels": np.arange(5) % 2}, "go together; name both with {rank}"),
        (
            {"private_embeddings": "a-{rank}-{part}.npy"},
            r"private_embeddings='a-{rank}-{part}.npy': want {rank}",
        ),
        ({"private_embeddings": "a-{rank:x}}.npy"}, "want {rank}"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path, named, said):
    write(tmp_path, [5, 8])
    with pytest.raises(ValueError, match=said):
        data_of(tmp_path, **named)


def test_records_that_cannot_be_compared_are_not_told(tmp_path, monkeypatch):
    write(tmp_path, [8, 8])
    data = data_of(tmp_path, 0, **TABLE)

    def broken(indices):
        raise OSError("patient-17.png is truncated")

    monkeypatch.setattr(data.private, "images", broken)
    with pytest.raises(PrivateSideError) as caught:
        data.private.check_same(lambda digest: True)
    assert "17" not in str(caught.value)
    monkeypatch.undo()
    digests = []
    for labels in (data.private.labels, data.private.labels.flip(0)):
        data.private.labels = labels
        data.private.check_same(lambda digest: digests.append(digest) or True)
    assert len(set(digests)) == 2
    assert {len(digest) for digest in digests} == {32}
