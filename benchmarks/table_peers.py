"""Private models of other packages on one table: ``python table_peers.py ARRAYS.npz EPSILON DELTA SEED``.

Prints test accuracies as JSON, None where a package has no model for so many classes. Runs in an environment of its
own, see :mod:`benchmarks.tables`. Numbers are in [0, 1] between stated bounds, −1 where they are missing, and
categories are 0 … k−1.
"""

import json
import sys
import warnings

import numpy as np
from diffprivlib.models import LogisticRegression
from interpret.privacy import DPExplainableBoostingClassifier


def encoded(rows, sizes):
    """Numbers in [-1, 1], 0 where they are missing, and one-hot categories."""
    parts = []
    for column, size in zip(rows.T, sizes, strict=True):
        numbers = np.where(column < 0, 0.0, 2 * column - 1)[:, None]
        parts.append(np.eye(size)[column.astype(int)] if size else numbers)
    return np.hstack(parts)


def logistic_regression(given, epsilon, seed):
    """Best of four: rows as they are or of unit length, with two penalties."""
    parts, best = [encoded(given[part], given["sizes"]) for part in ("private", "test")], 0.0
    unit = [part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-9) for part in parts]
    for (private, test), norm in ((parts, float(np.sqrt(len(given["sizes"])))), (unit, 1.0)):
        for penalty in (1.0, 0.01):
            model = LogisticRegression(epsilon=epsilon, data_norm=norm, C=penalty, random_state=seed)
            best = max(best, float(model.fit(private, given["labels"]).score(test, given["truth"])))
    return best


def boosting_machine(given, epsilon, delta, seed):
    """DP-EBM, of two classes."""
    if len(np.unique(given["labels"])) > 2:
        return None
    sizes = given["sizes"]
    private, test = (np.where(given[part] < 0, np.nan, given[part]) for part in ("private", "test"))
    model = DPExplainableBoostingClassifier(
        feature_types=["nominal" if size else "continuous" for size in sizes],
        privacy_bounds={place: (0.0, 1.0) for place, size in enumerate(sizes) if not size},
        epsilon=epsilon,
        delta=delta,
        random_state=seed,
        n_jobs=1,
    )
    return float(model.fit(private, given["labels"]).score(test, given["truth"]))


def main(path, epsilon, delta, seed):
    """Print the accuracies."""
    warnings.filterwarnings("ignore")
    with np.load(path) as file:
        given = dict(file)
    found = {
        "diffprivlib": logistic_regression(given, float(epsilon), int(seed)),
        "DP-EBM": boosting_machine(given, float(epsilon), float(delta), int(seed)),
    }
    print(json.dumps({name: value and round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
