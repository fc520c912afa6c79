"""Physical parts of a Poisson batch: what is read at once, and that workers change nothing."""

import pytest
import torch
from noisy_sgd_setup import make_data
from training_setup import Lit, Silent, fit, training

from pl_privknn.datamodules.formats.poisson_loader import PoissonTraining, PrivateRecords
from pl_privknn.privacy.noise import SeededNoise


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_batch_is_read_in_parts_of_almost_one_size(tmp_path, monkeypatch):
    read, own = [], PrivateRecords.images
    monkeypatch.setattr(
        PrivateRecords, "images", lambda self, places: read.append(len(places)) or own(self, places)
    )
    fit(Lit(), tmp_path, training(physical_batch_size=4, noise_source=Silent(0)), epochs=2)
    read = [count for count in read if count]  # what is left of a batch after its step has no rows
    assert max(read) <= 4
    assert len(read) > 12
    assert min(read) >= 3  # of 20 records in the mean, one at a time would be a seed in 10⁶


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_the_sampler_s_whoever_reads_them(workers):
    data = make_data()
    data.setup("fit")
    made = PoissonTraining(data.private, 1 / 3, lambda: SeededNoise(3))
    drawn = list(made.batches)
    batches = list(made.loader(num_workers=workers))
    assert len(batches) == len(drawn)
    for batch, places in zip(batches, drawn, strict=True):
        images, labels = batch.taken()
        torch.testing.assert_close(images[:], data.private.store.read(torch.tensor(places)))
        assert labels.tolist() == data.private.labels[places].tolist()
        with pytest.raises(RuntimeError, match="asked for twice"):
            batch.taken()
        assert len(batch.records) == 0
        assert batch.records.untyped_storage().nbytes() == 0
