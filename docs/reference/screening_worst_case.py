"""Which vote count is the worst for noisy screening? Draws docs/reference/screening_worst_case.png.

Left: RDP ε(α) of one screening for every largest vote count n* (k 300, T 210, σ 85, no sampling). Middle: five of
those curves, up to large orders. Right: ε of up to 8,192 screenings of samples at rate 0.25, for each n*, the
maximum over all n*, and the exact worst case over an adversary who chooses n* anew for every query. After Figures
1 to 3 of the supplement of Private-kNN (Zhu, Yu, Chandraker, Wang, CVPR 2020).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pl_privknn.privacy import account
from pl_privknn.privacy.accounting.rdp import epsilon_classic, pairs_rdp
from pl_privknn.privacy.mechanisms import Charge, NoisyScreening

SCREENING = {"k": 300, "threshold": 210, "sigma": 85.0, "num_classes": 10}
DELTA = 1e-5
_SHOWN = (30, 120, 210, 255, 300)


def curves(
    mechanism: NoisyScreening, orders: NDArray[np.float64], counts: Iterable[int] | None = None
) -> dict[int, NDArray[np.float64]]:
    """ε(α) for each largest vote count, or for some, the larger one of its two neighbours."""
    log_p, log_q = mechanism.log_dominating_pairs("add_remove")
    steps = len(log_p) // 2
    lowest = mechanism.k - steps
    found: dict[int, NDArray[np.float64]] = {}
    for count in range(lowest, mechanism.k + 1) if counts is None else counts:
        # Pairs are (t, t+1) for all t, then (t+1, t); a count is in up to two of either.
        places = [t - lowest for t in (count - 1, count) if lowest <= t < mechanism.k]
        both = [*places, *(place + steps for place in places)]
        found[count] = pairs_rdp(log_p[both], log_q[both], orders)
    return found


def draw(path: Path) -> None:
    """Draw the three panels."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    orders = np.linspace(1.5, 50, 60)
    every = curves(NoisyScreening(**SCREENING), orders)
    counts = np.array(list(every))
    mesh = left.pcolormesh(orders, counts, np.stack([every[count] for count in counts]), shading="nearest")
    worst = counts[np.argmax(np.stack([every[count] for count in counts]), axis=0)]
    left.plot(orders, worst, color="red", label="worst n*")
    left.axhline(SCREENING["threshold"], color="white", linestyle="--", label="n* = T")
    left.set(xlabel="order α", ylabel="largest vote count n*", title="RDP of one screening")
    left.legend()
    figure.colorbar(mesh, ax=left, label="ε(α)")

    far = np.geomspace(2, 3000, 80)
    shown = curves(NoisyScreening(**SCREENING), far, _SHOWN)
    for count in _SHOWN:
        middle.plot(far, shown[count], label=f"n* = {count}")
    middle.set(xscale="log", yscale="log", xlabel="order α", ylabel="ε(α)", title="five vote counts")
    middle.legend()

    sampled = NoisyScreening(**SCREENING, sampling_rate=0.25)
    numbers = np.unique(np.geomspace(64, 8192, 8).astype(int))
    wide = 1 + np.geomspace(0.1, 1000, 300)
    each = curves(sampled, wide, _SHOWN)
    for count in _SHOWN:
        right.plot(
            numbers, [epsilon_classic(wide, n * each[count], DELTA) for n in numbers], label=f"n* = {count}"
        )
    reports = [account([Charge(sampled, int(n))], delta=DELTA) for n in numbers]
    right.plot(numbers, [r.epsilon_rdp_classic for r in reports], "k--", label="maximum over n*, classic")
    right.plot(numbers, [r.epsilon for r in reports], "k", label="exact worst case")
    right.set(xlabel="screenings at γ = 0.25", ylabel=f"ε at δ = {DELTA:g}", title="composition")
    right.legend()
    figure.savefig(str(path), dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
