"""Every YAML of configs/ through the real command line."""

import json
from pathlib import Path

import pytest

from pl_privknn.cli import main
from tests.cli.parsed_config import understood

# Comparisons are run by another command; see test_compare.py.
CONFIGS = sorted(
    path
    for path in (Path(__file__).resolve().parents[2] / "configs").glob("*.yaml")
    if not path.stem.startswith("compare_")
)
SMALL = [
    "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--labeling.rounds", "1",
    "--labeling.queries_per_round", "20", "--labeling.options.progress", "false", "--trainer.accelerator", "cpu",
    "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false",
]  # fmt: skip


DIGITS = [path for path in CONFIGS if path.stem.startswith("digits_")]
#: Training of PATE's teachers and of what deals them their parts.
BRIEF = {
    "digits_pate": ["teachers.init_args.steps"],
    "digits_guided_pate": ["teachers.init_args.steps", "partitioner.init_args.steps"],
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_is_understood(config):
    assert "labeling" in understood(config)


@pytest.mark.long(
    "digits_guided_pate",
    "digits_ind_knn",
    "digits_noisy_sgd_teacher",
    "digits_recommended",
    "digits_reverse_knn_local",
    "digits_reverse_knn_shuffle",
    "digits_simclr",
    "digits_statistics",
)
@pytest.mark.parametrize("config", DIGITS, ids=lambda path: path.stem)
def test_digits_config_runs(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = [f"--labeling.labeler.init_args.{name}=30" for name in BRIEF.get(config.stem, [])]
    assert main(["fit", "--config", str(config), *SMALL, *few, "--run_dir", "run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    if "simclr" in config.stem:  # public images alone
        assert summary.get("epsilon") is None
        return
    assert summary["epsilon"] > 0
    assert summary["guarantee"] == ("conditional" if "guided" in config.stem else "unconditional")
    if config.stem != "digits_noisy_sgd":  # trains on the records itself
        assert summary["queried"] > 0
