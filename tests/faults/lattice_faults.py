"""Faults in sums of whole steps, and in the rounded noise that they get."""

from __future__ import annotations

from .fault import Fault

_GAUSSIAN = "pl_privknn.privacy.mechanisms.gaussian"
_SAMPLERS = "pl_privknn.privacy.samplers"
_CURVATURE = "pl_privknn.labelers.statistics.curvature"
_LATTICE = "pl_privknn.labelers.statistics.lattice"

FAULTS = (
    Fault(
        "half-noise-on-multiples",
        "Sums in whole steps carry half the noise that was charged.",
        _GAUSSIAN,
        {
            "self.sigma / step)": "self.sigma / step / 2)",
        },
        ("test_rounded_normal::test_noise_on_multiples_is_that_of_the_mechanism",),
    ),
    Fault(
        "noise-rounded-before-it-is-scaled",
        "Noise has coarser steps than the sum, whose last digits show.",
        _GAUSSIAN,
        {
            "noise.rounded_normal(tuple(counts.shape), self.sigma / step)": (
                "noise.rounded_normal(tuple(counts.shape), self.sigma).div(step).long()"
            ),
        },
        ("test_rounded_normal::test_noise_on_multiples_is_that_of_the_mechanism",),
    ),
    Fault(
        "rounded-noise-by-float64-alone",
        "Where float64 can't tell the whole number, the first guess is kept.",
        _SAMPLERS,
        {
            "np.flatnonzero(low < high)": "np.flatnonzero(low > high)",
        },
        ("test_rounded_normal::test_numbers_next_to_a_border_are_decided_by_further_bits",),
    ),
    Fault(
        "quantiles-without-a-guard",
        "Float64's errors decide between whole numbers.",
        _SAMPLERS,
        {
            "_GUARD = 2.0**-45": "_GUARD = 2.0**-52",
        },
        ("test_rounded_normal::test_quantiles_are_a_hundred_times_better_than_the_guard",),
    ),
    Fault(
        "rounded-noise-without-further-bits",
        "A number next to a border is decided by the bits at hand.",
        _SAMPLERS,
        {
            "elif tail >= beyond + _SLACK:": "elif tail >= beyond - 1:",
        },
        ("test_rounded_normal::test_numbers_next_to_a_border_are_decided_by_further_bits",),
    ),
    Fault(
        "cut-to-the-nearest-step",
        "A record's coordinates may grow when they are brought to whole steps, beyond what is charged.",
        _LATTICE,
        {
            "(rows.double() / step).trunc()": "(rows.double() / step).round()",
        },
        ("test_lattice::test_vectors_are_cut_off_towards_zero",),
    ),
    Fault(
        "lengths-in-steps-unchecked",
        "What rounding made longer than the bound enters a sum.",
        _LATTICE,
        {
            "return torch.where(kept, steps, 0.0)": "return torch.where(kept | True, steps, 0.0)",
        },
        ("test_lattice::test_what_is_too_long_counts_as_none",),
    ),
    Fault(
        "gradients-in-steps-unchecked",
        "As much, for gradients.",
        _CURVATURE,
        {
            "torch.where(kept[:, None], left, 0.0)": "left",
        },
        ("test_lattice::test_gradients_that_are_not_clipped_count_as_none",),
    ),
    Fault(
        "gradients-in-steps-by-half-their-length",
        "The length of a gradient in steps is that of its errors.",
        _CURVATURE,
        {
            "squares = left.square().sum(dim=1) * right.square().sum(dim=1)": "squares = left.square().sum(dim=1)",
        },
        ("test_lattice::test_gradients_that_are_not_clipped_count_as_none",),
    ),
)
