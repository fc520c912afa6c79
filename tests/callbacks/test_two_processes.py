"""A training in two processes: one asks the private teacher, both learn from the same answers."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from pl_privknn.privacy.ledger.ledger import Ledger

SCRIPT = """
    import json, sys
    import torch
    import pytorch_lightning as pl
    from pl_privknn import Gaussian, PrivateKNN, PrivateLabeler, SupervisedStudent
    from pl_privknn.datamodules import DigitsDataModule
    from pl_privknn.privacy.noise import SeededNoise

    if __name__ == "__main__":
        folder = sys.argv[1]
        torch.set_num_threads(1)
        pl.seed_everything(0)
        data = DigitsDataModule(batch_size=32)
        teacher = PrivateKNN(k=60, sampling_rate=0.8, noise=Gaussian(14.0), noise_source=SeededNoise(0))
        labeling = PrivateLabeler(
            teacher, rounds=2, epochs_per_round=1, queries_per_round=40, query_batch_size=20, delta=1e-4,
            run_dir=folder, progress=False,
        )
        student = SupervisedStudent(network="small_cnn", in_channels=1, image_size=20, ema_decay=0.9)
        trainer = pl.Trainer(
            max_epochs=2, callbacks=[labeling], accelerator="cpu", devices=2, strategy="ddp", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(student, data)
        weights = torch.cat([p.detach().flatten() for p in student.parameters()])
        found = {
            "labels": data.public.labels.tolist(),
            "metrics": labeling.metrics,
            "weights": weights.double().norm().item(),
        }
        with open(f"{folder}/rank{trainer.global_rank}.json", "w") as file:
            json.dump(found, file)
"""


def test_one_process_asks_and_both_learn_from_the_same_answers(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(script), str(run)],
        capture_output=True, text=True, check=False, timeout=600, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((run / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert sum(label >= 0 for label in first["labels"]) == 80
    assert first["labels"] == second["labels"]
    assert first["metrics"] == second["metrics"]
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-9)
    # Every query was paid for once, not once a process.
    report = Ledger.open_readonly(run / "ledger.sqlite").report()
    assert sum(charge.count for charge in report.charged) == 80
    assert report.spent.epsilon == pytest.approx(first["metrics"]["privacy/epsilon_spent"])
