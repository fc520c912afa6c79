"""Noisy SGD in a trainer: what is refused, what stays private, features, and that it learns."""

import math

import pytest
import pytorch_lightning as pl
import torch
from noisy_sgd_setup import PRIVATE, Flat, NoNoise, fit, keep_last, make, make_data
from torch.nn import functional as F

from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.features.whitening import PublicWhitening
from pl_privknn.training import FeatureHead, NoisySGD


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": None}, "epsilon=None, noise_multiplier=None"),
        ({"feature_head": {"components": 65}}, "components"),
        ({"feature_head": {"head": "deep"}}, "head"),
        ({"normalization": {"mean": [0.5]}}, "std"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_fast_dev_run_touches_no_private_record(tmp_path):
    class Sealed(ArraysDataModule):
        @property
        def private(self):
            raise AssertionError("a private record was read")

    for extractor in (True, False):
        fit(
            make(extractor=extractor, noise_source=NoNoise()),
            tmp_path,
            data=make_data(Sealed),
            fast_dev_run=True,
        )
    assert not list(tmp_path.glob("*.sqlite"))


@pytest.mark.parametrize("extractor", [True, False])
def test_checkpoints_and_logs_hold_nothing_private(tmp_path, extractor):
    data = make_data()
    callback = keep_last(tmp_path)
    names = set()

    class Names(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            names.update(trainer.callback_metrics)

        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            names.update(trainer.callback_metrics)

    module = make(extractor=extractor)
    trainer = fit(module, tmp_path, data=data, callbacks=[callback, Names()])
    assert names | set(trainer.callback_metrics) == {
        "val/accuracy", "val/loss", "privacy/epsilon", "privacy/epsilon_spent", "privacy/delta",
        "privacy/guarantee",
    }  # fmt: skip
    saved = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=False)
    everything = []

    def walk(value):
        if isinstance(value, torch.Tensor):
            everything.append(value)
        elif isinstance(value, dict):
            for item in [*value.keys(), *value.values()]:
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        else:
            assert value is None or isinstance(value, str | int | float | bool), type(value)

    walk(saved)
    assert all(PRIVATE not in tensor.shape for tensor in everything)
    raw = (tmp_path / "ckpt" / "last.ckpt").read_bytes()
    data.setup("fit")
    with torch.no_grad():
        vectors = module.inputs(data.private.images())
    for rows in (data.private.images().flatten(1), vectors.flatten(1)):
        assert not any(row.numpy().tobytes()[:32] in raw for row in rows)
    assert "private_training" in saved


def test_module_loads_from_its_checkpoint(tmp_path):
    module, data = make(feature_head=FeatureHead("mlp", 8, 5)), make_data()
    fit(module, tmp_path, data=data, callbacks=[keep_last(tmp_path)])
    loaded = NoisySGD.load_from_checkpoint(tmp_path / "ckpt" / "last.ckpt", extractor=Flat())
    module.eval(), loaded.eval()
    torch.testing.assert_close(loaded(data.test.images()), module(data.test.images()))


def test_whitening_is_learned_from_public_features_and_works_row_by_row():
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(300, 6, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.1]) + 4
    change = PublicWhitening(6, 3, power=1.0).fit(public)
    centred = (public - public.mean(dim=0)).double()
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    projected = centred @ directions[:3].T / (values[:3] / math.sqrt(300))
    cosine = F.cosine_similarity(change(public).double().abs(), projected.abs(), dim=1)
    assert float(cosine.min()) > 1 - 1e-5
    others = torch.randn(5, 6, generator=generator)
    torch.testing.assert_close(change(others)[2:3], change(others[2:3]))
    torch.testing.assert_close(change(others).norm(dim=1), torch.ones(5))
    with pytest.raises(ValueError, match="components=3"):
        PublicWhitening(6, 3).fit(public[:2])
    with pytest.raises(RuntimeError, match="fit"):
        PublicWhitening(6)(public)


def test_features_are_normalised_by_public_images_only(tmp_path):
    means = []
    for shift in (0.0, 0.3):
        data = make_data()
        data.setup("fit")
        data._private.store._images.add_(shift)
        module = make(feature_head=FeatureHead(components=4))
        fit(module, tmp_path / str(shift), epochs=1, data=data, limit_train_batches=1)
        means.append(module.whitening.mean.clone())
    torch.testing.assert_close(means[0], means[1], rtol=0, atol=0)


def test_it_learns(tmp_path):
    module, data = (
        make(
            epsilon=8.0,
            expected_batch_size=45,
            max_grad_norm=0.5,
            lr=4.0,
            feature_head=FeatureHead(components=4),
        ),
        make_data(),
    )
    trainer = fit(module, tmp_path, epochs=20, data=data)
    assert (
        trainer.test(module, data, verbose=False)[0]["test/accuracy"] >= 0.9
    )  # with seeded noise; 0.5 is chance
