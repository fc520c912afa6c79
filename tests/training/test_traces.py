"""Neighbouring private sets leave the same traces, and averaged weights cost nothing."""

import json

import torch
from noisy_sgd_setup import PRIVATE, charged, keep_last, make_data
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.loggers import CSVLogger
from training_setup import Lit, fit, training

from pl_privknn.callbacks import RunReport
from pl_privknn.datamodules import ArraysDataModule


def fewer(private_images, private_labels, **kwargs):
    """The same data without its last private record."""
    return ArraysDataModule(private_images=private_images[:-1], private_labels=private_labels[:-1], **kwargs)


def keys_and_shapes(value):
    if isinstance(value, dict):
        return {name: keys_and_shapes(item) for name, item in value.items()}
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def traces(folder, cls):
    callbacks = [keep_last(folder), RunReport(folder)]
    fit(
        Lit(), folder, epochs=2, data=make_data(cls), callbacks=callbacks,
        logger=CSVLogger(folder, "", ""), log_every_n_steps=1,
    )  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("run", "seconds", "ledger_head", "val_accuracy", "test_accuracy"):
        assert summary.pop(name, None) != PRIVATE
    saved = torch.load(folder / "ckpt" / "last.ckpt", weights_only=False)
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return summary, keys_and_shapes(saved), header, files, charged(folder), saved["loops"]


def test_neighbouring_sets_leave_the_same_traces(tmp_path):
    one, other = (traces(tmp_path / name, cls) for name, cls in (("a", ArraysDataModule), ("b", fewer)))
    for left, right in zip(one, other, strict=True):
        assert left == right
    assert one[0]["sampling_rate"] == 30 / PRIVATE  # of public constants
    assert one[0]["steps"] == 6
    assert "private_training" in one[1]


def test_averaged_weights_are_made_of_released_ones(tmp_path):
    plain, averaged = Lit(), Lit()
    callback, _ = fit(plain, tmp_path / "plain")
    other, _ = fit(averaged, tmp_path / "averaged", training(), callbacks=[EMAWeightAveraging(decay=0.5)])
    assert other.epsilon == callback.epsilon
    ours, theirs = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (plain, averaged))
    assert torch.isfinite(theirs).all()
    assert not torch.equal(ours, theirs)
