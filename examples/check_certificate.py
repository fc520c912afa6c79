"""Check a certificate of epsilon with numpy and scipy alone: python check_certificate.py CERTIFICATE.json.

Each release's profile H_s(P||Q), the largest P - s*Q of an event, follows from public parameters. A pair on a grid
is above it by more than rounding at all grid points, both ways; between them it is a chord of a convex function.
Blocks of one family: the induction is repeated, U = W - (r - 1)+ by chords of the convex W; beyond the grid W(r) is
at most W(a)*r/a, U(r) at most U(b). Pairs compose by FFT of tilted masses, with bounds on rounding and on the rest.
"""

import hashlib
import json
import sys

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtr
from scipy.stats import nbinom

U, TAU, LONG = 2.0**-52, 1e-14, np.longdouble  # TAU: bounds the errors of closed forms and sums in LONG


def need(holds, message):
    if not np.all(holds):  # a NaN is refused too
        raise SystemExit(f"refused: {message}")


def family(c, cells=()):
    """Of each pair: ratios 1 + rise and 1 - fall of its two outcomes, probability of the former without."""
    if c["mechanism"] == "noisy_screening":
        lowest = -(-c["k"] // c["num_classes"]) * (c["sampling_rate"] == 1)
        margin = (np.arange(lowest, c["k"] + 1) - c["threshold"]) / c["sigma"]
        up, down = np.diff(log_ndtr(margin)), np.diff(log_ndtr(-margin))  # one vote more: passes, fails
        rise, fall = np.append(up, -down), np.append(down, -up)
    else:  # cells of x, where the touched class has probability (g^x - 1)/(g - 1) without the record
        x, gain = np.array(cells), (1 if c["votes"] == "add" else 2) / c["scale"]
        need((x[0] == 0) & (x[-1] == 1) & (np.diff(x) > 0), "cells do not cover [0, 1]")
        rise, fall = gain * (1 - x[:-1]), -gain * x[1:]
    rise, fall = (c["sampling_rate"] * y * (1 + 8 * U) for y in (np.expm1(rise), -np.expm1(fall)))
    order = np.lexsort((-rise, -fall))  # a pair whose ratios lie between another's never counts
    order = order[rise[order] > np.append(-1, np.maximum.accumulate(rise[order])[:-1])]
    return [(rise[k], fall[k], fall[k] / (rise[k] + fall[k])) for k in order]


def profile(c, s, way):
    """H_s(with||without) of one release at s >= 1, and where way is -1 H_s(without||with)."""
    kind, rate, rest = c["mechanism"], c.get("sampling_rate", 1.0), 0.0
    if kind == "block":
        return s * np.interp(1 / s, *c["values"]) if way > 0 else np.interp(s, *c["values"])
    if kind == "noisy_screening":
        lines = [a * (b - (s - 1)) if way > 0 else (1 - a) * (s * f - (s - 1)) for b, f, a in family(c)]
        return np.max([0 * s, *lines], axis=0)
    share = rate if way > 0 else np.maximum(rate - (1 - rate) * (s - 1), 0)  # of the unsampled pair's profile at t
    t = 1 + (s - 1) / rate if way > 0 else rate * s / np.maximum(share, U)
    if kind == "gaussian":
        mu = c["l2_sensitivity"] / c["sigma"]
        return share * (ndtr(mu / 2 - np.log(t) / mu) - t * ndtr(-mu / 2 - np.log(t) / mu) + 4 * U * mu**2)
    if kind == "laplace":
        return share * np.maximum(-np.expm1((np.log(t) - c["l1_sensitivity"] / c["scale"]) / 2), 0)
    if kind == "exponential_argmax":
        gain = (1 if c["votes"] == "add" else 2) / c["scale"]
        return share * t * np.expm1(np.maximum(gain - np.log(t), 0) / 2) ** 2 / np.expm1(gain)
    if kind == "negative_binomial":  # one cell, where a vote more makes x of x - 1, and 0 shows that it is missing
        noise, more = nbinom(c["shape"], 1 - c["ratio"]), int(way * c["turned"] > 0)
        x = np.arange(1, noise.isf(1e-30) + 2)
        p, q, rest = noise.pmf(x - more), noise.pmf(x - 1 + more), (1 - more) * noise.pmf(0)
    else:
        need(kind == "pure_dp", f"mechanism {kind!r} is unknown")
        q = np.exp([0.0, -c["epsilon"]]) / (1 + np.exp(-c["epsilon"]))
        p = q[::-1]
    return rest + share * sum(np.maximum(a - t.astype(LONG) * b, 0) for a, b in zip(p, q, strict=True))


def blocks(values, c):
    """Blocks of a family by size: each value function is at least what the induction makes of the one before."""
    steps = {int(n): np.append(0, u) for n, u in values["steps"].items()}
    now, pairs = np.zeros(len(steps[max(steps)])), family(c, values.get("cells"))
    x = np.append(0, r := np.exp(values["spacing"] * (values["first"] + np.arange(len(now) - 1))))
    need((np.diff(x) > 0) & np.any(r[:-1] == 1), "the grid of value functions does not reach beyond 1")
    direct = [np.where(r < 1, a * (r - 1 + r * b), (1 - a) * (1 - r + r * f)) for b, f, a in pairs]
    for n in range(1, max(steps) + 1):
        now = [a * np.interp(r + r * b, x, now) + (1 - a) * np.interp(r - r * f, x, now) for b, f, a in pairs]
        now = np.append(0, np.max(now + np.maximum(direct, 0), axis=0))
        need(steps.get(n, np.inf) >= now * (1 + 1e-10), f"value function {n} is below what the induction gives")
        now = steps.get(n, now)
    return {n: {"mechanism": "block", "values": (x, u)} for n, u in steps.items()}


def dominating(pair, c, step):
    """Both directions of a pair, checked against c's profiles: log masses, indices, the rest's mass, count."""
    index, found = pair["first"] + np.arange(len(pair["masses"])), []
    larger = np.array(pair["masses"], dtype=np.int64).astype(LONG) / 2**62  # upper for losses >= 0, else lower
    need((larger >= 0) & (index[0] <= 0 <= index[-1]) & (pair["count"] in range(1, 2**62)), "masses or count")
    for way in (1, -1):
        at, both = (way * index)[::way], (larger, larger * np.exp(-step * np.abs(index)))
        mass, other = (np.where(way * index >= 0, *two)[::way] for two in (both, both[::-1]))
        s, rest = np.exp(step * at[at >= 0]), 1 - mass.sum()
        above = [(np.cumsum(x[::-1])[::-1] - x)[at >= 0] for x in (mass, other)]
        enough = rest + above[0] - s * above[1] >= profile(c, s, way) + TAU + len(s) * np.finfo(LONG).eps
        need((rest >= 0) & enough, f"a pair does not dominate {c['mechanism']}")
        found.append((np.log(np.maximum(mass, 1e-300).astype(float)), at, float(rest), pair["count"]))
    return found


def composed(pieces, step, tilt, top, length):
    """Losses and upper masses of a total in one direction, rounding included, and the mass beyond."""
    need((tilt > 0) & (length & (length - 1) == 0) & (step * (top - length + 1) <= 0.9 * epsilon), "window")
    total, bound, centre, moment, err = 0.0, 0.0, 0, 0.0, 8 * U * np.log2(length)
    for mass, at, _, n in pieces:
        mass = mass + tilt * step * at
        moment += n * (logsumexp(mass) + 8 * U * (50 + np.max(np.abs(mass))))  # and rounding, relative
        mass = np.exp(mass - logsumexp(mass))
        centre += n * (middle := round(float(at @ mass)))
        spectrum = np.fft.rfft(np.bincount((at - middle) % length, mass, length)) + 1e-300
        total, bound = total + n * np.log(spectrum), bound + n * np.log(np.abs(spectrum) + err)
    kept, number = np.exp(total.real), sum(n for *_, n in pieces)
    error = 2 * np.sum(np.exp(bound) - kept + kept * (32 * U * number + err)) / length
    at = np.arange(max(0, top - length + 1), top + 1)
    mass = np.maximum(np.fft.irfft(np.exp(total), length)[(at - centre) % length], 0) + error
    beyond = np.exp(moment - tilt * step * top) - np.expm1(sum(n * np.log1p(-p) for _, _, p, n in pieces))
    return step * at, mass * np.exp(moment - tilt * step * at), beyond


document = json.load(open(sys.argv[1], encoding="utf-8"))  # noqa: SIM115
need(document.pop("digest") == hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest(), "digest")
wanted, pieces, square, replace = [], [], 0.0, document["adjacency"] != "add_remove"
for c in document["charges"]:
    rate, count = c.get("sampling_rate", 1), c["count"]
    need(not replace or (rate == 1 and c.get("votes") != "add"), f"not defined under replace_one: {c}")
    need([v >= 0 for v in c.values() if not isinstance(v, str)] + [rate <= 1, c["count"] > 0], f"refused: {c}")
    if c["mechanism"] in ("gaussian", "gaussian_dp_stream") and rate == 1:
        square += count * (c["mu"] if "mu" in c else c["l2_sensitivity"] / c["sigma"]) ** 2
    elif c["mechanism"] == "negative_binomial":  # cells, and those that lose a vote
        wanted += [({**c, "turned": i, "sampling_rate": 1}, count * c["moved"]) for i in (1, -1)[: 1 + replace]]
    elif c["mechanism"] == "randomized_response":  # places of the message, each pure
        pure = np.log((1 - c["flip_probability"]) * (c["num_values"] - 1) / c["flip_probability"]) * (1 + 8 * U)
        wanted.append(({"mechanism": "pure_dp", "epsilon": pure}, count * c["differing"]))
    else:
        wanted.append((c, count))
if square:  # Gaussian releases add up to one
    wanted.insert(0, ({"mechanism": "gaussian", "l2_sensitivity": square**0.5 * (1 + 8 * U), "sigma": 1}, 1))
parts, step, epsilon, delta = (document[name] for name in ("parts", "step", "epsilon", "delta"))
need((sum("values" in part for part in parts) <= 1) & (step > 0), "more than one family is taken in blocks")
for (c, count), part in zip(wanted, parts, strict=True):
    sizes = blocks(part["values"], c) if "values" in part else {1: c}
    need(sum(pair["count"] * pair["size"] for pair in part["pairs"]) == count, "pairs do not cover the releases")
    pieces += [dominating(pair, sizes[pair["size"]], step) for pair in part["pairs"]]
totals = [composed(way, step, *w) for way, w in zip(zip(*pieces, strict=True), document["windows"], strict=True)]
found = [rest + mass @ np.maximum(-np.expm1(np.minimum(epsilon - loss, 0)), 0) for loss, mass, rest in totals]
need([d <= stated <= delta for d, stated in zip(found, document["composed"], strict=True)], f"delta is {found}")
print(f"epsilon {epsilon:.9g} follows at delta {delta:g}, {document['guarantee']}; delta {max(found, default=0)}")
