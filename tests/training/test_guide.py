"""The modules of the guide are trained privately as it shows, smaller ones and on few and small images."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "private_training.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
SMALLER = {
    "max_epochs=10": "max_epochs=1, limit_train_batches=2, limit_val_batches=1, logger=False, "
    "enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator='cpu'",
    "expected_batch_size=250, private_records=1000": "expected_batch_size=4, private_records=20",
    "DigitsDataModule()": "DigitsDataModule(private_records=20, public_examples=20)",
    '"vit_tiny_patch16_224", ': '"vit_tiny_patch16_224", embed_dim=24, depth=2, ',
}


@pytest.mark.parametrize("which", [1, 2], ids=["mlp", "lora"])
def test_modules_of_the_guide_are_trained_privately(which, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[which]
    for full, small in SMALLER.items():
        code = code.replace(full, small)
    scope: dict = {}
    exec(BLOCKS[0], scope)
    exec("from pl_privknn import PrivateTraining\nfrom pl_privknn.datamodules import DigitsDataModule", scope)
    exec("from pl_privknn.privacy import Budget", scope)
    exec(code, scope)
    private = scope["private"]
    assert private.planned_steps == 2
    assert 1.9 < private.epsilon <= 2.0
    assert private.ledger.report().guarantee.guarantee == "unconditional"
    if which == 2:
        trained = {name.split(".")[-2] for name, p in scope["vit"].named_parameters() if p.requires_grad}
        assert trained == {"down", "up", "head"}
        assert scope["vit"].blocks[0].attn.qkv.up.weight.any()
