"""Noisy SGD in a trainer: what is refused, what stays private, features, that it learns, and how it resumes."""

import json
import math
import shutil

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from pl_privknn.cli import main
from pl_privknn.features.public import PublicWhitening
from pl_privknn.privacy.ledger import LedgerCorrupt
from pl_privknn.training import FeatureHead, NoisySGD
from tests.setup.refusals import refusals
from tests.training.noisy_sgd_setup import PRIVATE, Flat, fit, keep_last, make, make_data

test_bad_arguments_are_named = refusals(
    {
        "components": lambda: make(feature_head={"components": 65}),
        "head": lambda: make(feature_head={"head": "deep"}),
        "std": lambda: make(normalization={"mean": [0.5]}),
    }
)


@pytest.mark.parametrize("extractor", [True, False])
def test_checkpoints_hold_nothing_private_and_give_the_module_back(tmp_path, extractor):
    data = make_data()
    module = make(extractor=extractor, **({"feature_head": FeatureHead("mlp", 8, 5)} if extractor else {}))
    fit(module, tmp_path, data=data, callbacks=[keep_last(tmp_path)])
    path = tmp_path / "ckpt" / "last.ckpt"
    saved, raw = torch.load(path, weights_only=False), path.read_bytes()
    assert "private_training" in saved
    for one in tree_leaves(saved):
        assert one is None or isinstance(one, torch.Tensor | str | int | float | bool), type(one)
        assert not isinstance(one, torch.Tensor) or PRIVATE not in one.shape
    data.setup("fit")
    with torch.no_grad():
        vectors = module.inputs(data.private.images())
    for rows in (data.private.images().flatten(1), vectors.flatten(1)):
        assert not any(row.numpy().tobytes()[:32] in raw for row in rows)
    if extractor:
        loaded = NoisySGD.load_from_checkpoint(path, extractor=Flat())
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
    head = FeatureHead(components=4)
    module = make(epsilon=8.0, expected_batch_size=45, max_grad_norm=0.5, lr=4.0, feature_head=head)
    trainer = fit(module, tmp_path, epochs=20, data=(data := make_data()))
    # With seeded noise; 0.5 is chance.
    assert trainer.test(module, data, verbose=False)[0]["test/accuracy"] >= 0.9


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with a checkpoint, and its ledger before the first charge."""
    folder, copies = tmp_path_factory.mktemp("trained"), []

    class Copy(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            copies.append((folder / "run.sqlite").read_bytes())

    fit(make(), folder, 2, callbacks=[keep_last(folder), Copy()])
    return folder, copies[0]


@pytest.mark.parametrize(
    "changed",
    [
        *({"noise_multiplier": 2.0}, {"expected_batch_size": 20}, {"max_grad_norm": 2.0}, {"delta": 1e-6}),
        {"epochs": 4},
    ],
)
def test_other_privacy_parameters_on_resume_are_refused(trained, changed):
    folder, _ = trained
    changed = dict(changed)
    epochs = changed.pop("epochs", 3)
    with pytest.raises(ValueError, match="other parameters"):
        fit(make(**changed), folder, epochs, ckpt_path=folder / "ckpt" / "last.ckpt")


def test_a_missing_or_older_ledger_is_refused(trained, tmp_path):
    folder, older = shutil.copytree(trained[0], tmp_path / "copy"), trained[1]
    path, resume = folder / "run.sqlite", {"ckpt_path": folder / "ckpt" / "last.ckpt"}
    for file in folder.glob("run.sqlite*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"with its ledger, is missing.* Restore it"):
        fit(make(run_dir=folder), folder, **resume)
    path.write_bytes(older)
    with pytest.raises(LedgerCorrupt, match=r"noted by the checkpoint.*older copy"):
        fit(make(), folder, **resume)


@pytest.mark.long
def test_command_line_and_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "--model", "NoisySGD", "--model.network", "tanh_cnn", "--model.expected_batch_size", "250",
        "--model.private_records", "1000",
        "--model.budget.epsilon", "2", "--model.budget.delta", "1e-4",
        "--data", "DigitsDataModule", "--run_dir", "run",
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "2",
        "--trainer.enable_model_summary", "false",
    ]  # fmt: skip
    assert main(["fit", *words]) == 0
    assert "noisy steps" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1.98 < summary["epsilon"] <= 2
    assert (summary["delta"], summary["adjacency"], summary["steps"]) == (1e-4, "add_remove", 8)
    assert summary["guarantee"] == "unconditional"
    assert 0 <= summary["test_accuracy"] <= 1
    assert main(["audit", "run/run.sqlite", "--delta", "1e-4", "--json"]) == 0
    audited = json.loads(capsys.readouterr().out)
    assert audited["epsilon"] == pytest.approx(summary["epsilon"])
    # A finished run costs nothing more, and other parameters are an error, not a silent change.
    assert main(["fit", "--resume", "run"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] == summary["epsilon"]
    assert main(["audit", "run"]) == 0
    capsys.readouterr()
    assert main(["fit", "--resume", "run", "--model.budget.epsilon", "3"]) == 2
    assert "epsilon=2.0 then, 3.0 now" in capsys.readouterr().err
