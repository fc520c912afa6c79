"""Recompute the ε of a run from the rows of its ledger: python recompute_epsilon.py RUN.

RUN is the folder of a run, or a ledger. The rows are read by sqlite3 and composed by dp_accounting; pl_privknn is not
imported. The result is an upper bound: the stated ε up to rounding, a few percent more where queries were screened.
Exit status 1: the summary in the folder states more than 10 % less.
"""

import collections
import json
import math
import sqlite3
import sys
from pathlib import Path

import numpy as np
from dp_accounting.pld import common, pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr

STEP, ROUNDING = 1e-4, 1e-4  # spacing of losses; relative effect of other grids on the stated ε, at most


def read_releases(path):
    """Return δ, and how often each run may make each release: the larger of planned and charged."""
    with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True) as database:
        rows = [json.loads(body) for (body,) in database.execute("SELECT body FROM rows ORDER BY position")]
    planned, charged = collections.Counter(), collections.Counter()
    for row in rows:
        found, kind = collections.Counter(), row["kind"]
        for record in row["plan"] if kind == "plan" else [row["charge"]] if kind == "charge" else []:
            fields = {name: record[name] for name in record.keys() - {"count", "guarantee", "reasons"}}
            found[row["run"], json.dumps(fields, sort_keys=True)] += record.get("count", 1)
        if kind == "plan":
            planned |= found
        else:
            charged += found
    return rows[0]["delta"], planned | charged


def screening(release):
    """Return a pessimistic privacy loss distribution of one screening: one record changes the vote count by one."""
    rate = release["sampling_rate"]
    lowest = 0 if rate < 1 else math.ceil(release["k"] / release["num_classes"])
    margin = (np.arange(lowest, release["k"] + 1) - release["threshold"]) / release["sigma"]
    passes, fails = log_ndtr(margin), log_ndtr(-margin)  # neighbouring tables have neighbouring counts
    log_p = np.concatenate([passes[:-1], fails[:-1], passes[1:], fails[1:]])
    log_q = np.concatenate([passes[1:], fails[1:], passes[:-1], fails[:-1]])
    largest = math.log1p(rate * math.expm1(min(np.max(log_p - log_q), 50.0)))  # larger ones count as infinite
    s = np.exp(STEP * np.arange(math.ceil(largest / STEP) + 2))

    def unsampled(t):  # the largest P[E] - t·Q[E] at t >= 1, where E is one outcome
        return np.max(np.exp(log_p) - np.exp(log_q) * t[:, None], axis=1, initial=0.0)

    share = rate - (1 - rate) * (s - 1)
    ahead = rate * unsampled(1 + (s - 1) / rate)  # of (1 - rate)·Q + rate·P against Q, and of Q against it
    back = np.where(share > 0, share * unsampled(rate * s / np.maximum(share, 1e-9)), 0.0)
    pmfs = []
    for one, other in ((ahead, back), (back, ahead)):
        deltas = np.concatenate([(1 - 1 / s + other / s)[:0:-1], one]).clip(0.0, 1.0)  # at 1/s, at s
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots(STEP, np.arange(1 - len(s), len(s)), deltas))
    return pld.PrivacyLossDistribution(*pmfs)


def distribution(release):
    """Return a pessimistic privacy loss distribution of one release."""
    kind, grid = release["mechanism"], {"value_discretization_interval": STEP}
    sampled = {**grid, "sampling_prob": release.get("sampling_rate", 1.0)}
    if kind == "gaussian":
        return pld.from_gaussian_mechanism(release["sigma"] / release["l2_sensitivity"], **sampled)
    if kind == "laplace":
        return pld.from_laplace_mechanism(release["scale"] / release["l1_sensitivity"], **sampled)
    if kind == "gaussian_dp_stream":
        return pld.from_gaussian_mechanism(1 / release["mu"], **grid)
    if kind == "exposure" or (kind == "pure_dp" and release["sampling_rate"] == 1):
        cost = common.DifferentialPrivacyParameters(release.get("epsilon", 0.0), release.get("delta", 0.0))
        return pld.from_privacy_parameters(cost, **grid)
    if kind == "noisy_screening":
        return screening(release)
    raise SystemExit(f"{kind}: dp_accounting has no such release; privknn audit recomputes its ε")


def main(run):
    """Print the releases and ε; return the exit status."""
    delta, releases = read_releases(run / "run.sqlite" if run.is_dir() else run)
    total = pld.identity(STEP)
    for (_, text), count in releases.items():
        print(f"{count} × {text}")
        release = json.loads(text)  # that of a conditional guarantee is inside
        total = total.compose(distribution(release.get("inner", release)).self_compose(count))
    epsilon = total.get_epsilon_for_delta(delta) * (1 + ROUNDING)
    print(f"recomputed ε = {epsilon:.6g} at δ = {delta:g}")
    if not (run / "summary.json").is_file():
        return 0
    stated = float(json.loads((run / "summary.json").read_text(encoding="utf-8"))["epsilon"])
    print(f"stated ε = {stated:.6g}, {100 * (1 - stated / epsilon):.3g} % below")
    return int(stated < 0.9 * epsilon)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
