"""Writes opake_one_run.json: Opake's one-run estimator on attacks of ours.

opake-auditing wants torch 2.9 and Python 3.11 to 3.13, more than this package does, so that no test imports it:

    pip install --no-deps opake-{auditing,engine,accounting,base}==0.16.1 optree
    python -m tests.auditing.opake_one_run
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pl_privknn.auditing import small_target
from pl_privknn.auditing.attack import score_labeler
from pl_privknn.labelers import ReverseKNN
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise

STORED = Path(__file__).with_suffix(".json")


def main():
    import opake.auditing as auditing
    from opake.auditing.types import CoinFlip

    rows = []
    for epsilon in (0.5, 1.0, 2.0, 4.0):
        seen, _ = score_labeler(small_target(ReverseKNN(budget=Budget(epsilon=epsilon))), 600, SeededNoise(0))
        ids, there = np.arange(len(seen.present)), seen.present
        coins = CoinFlip(
            num_canaries=len(ids),
            canary_indices=ids,
            _in_mask=there,
            in_indices=ids[there],
            out_indices=ids[~there],
        )
        found = auditing.one_run(auditing.canary_scores(seen.scores, canary_indices=ids), coin_flip=coins)
        middle = float(np.median(seen.scores))
        right = int(np.sum((seen.scores >= middle) == there))
        for significance in (0.05, 0.01):
            lower = found.eps_delta().epsilon_at(delta=0.0, significance=significance, threshold=middle)
            rows.append({
                "epsilon": epsilon,
                "guesses": len(ids),
                "right": right,
                "confidence": 1 - significance,
                "epsilon_lower_bound": round(lower, 6),
            })  # fmt: skip
    text = ",\n  ".join(json.dumps(row) for row in rows)
    made = f"opake-auditing {version('opake-auditing')}, one_run(…).eps_delta().epsilon_at(delta=0, threshold=median)"
    STORED.write_text(f'{{"made_by": "{made}", "runs": [\n  {text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
