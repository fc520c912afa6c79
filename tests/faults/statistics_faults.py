"""Faults in teachers that release statistics: noise, norms, constants, payments."""

from __future__ import annotations

from .fault import Fault

_TEACHER = "pl_privknn.labelers.statistics.teacher"
_SUMS = "pl_privknn.labelers.statistics.class_sums"
_CURVATURE = "pl_privknn.labelers.statistics.curvature"

FAULTS = (
    Fault(
        "half-noise-statistics",
        "Sums carry half the noise that was charged.",
        _TEACHER,
        {
            "add_noise_to_multiples(exact, self.step(release), noise)": (
                "add_noise_to_multiples(2 * exact, self.step(release), noise) / 2"
            ),
        },
        ("test_statistics::test_what_enters_the_model_is_the_sum_and_the_charged_noise",),
    ),
    Fault(
        "unclipped-rows-statistics",
        "A record with long features moves a sum as far as it likes.",
        _TEACHER,
        {
            "unit = torch.nn.functional.normalize(self.transformed(features), dim=1) * _INSIDE": "unit = self.transformed(features)",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "features-without-number-spoil-a-sum",
        "One record whose features overflow turns a release into NaN, which tells of it.",
        _TEACHER,
        {
            "unit = torch.where(unit.isfinite().all(dim=1, keepdim=True), unit, 0.0)": "unit = unit + 0.0",
        },
        ("test_statistics::test_features_that_overflow_count_as_none",),
    ),
    Fault(
        "statistics-over-the-true-number",
        "The model is divided by the number of private records.",
        _CURVATURE,
        {
            "divisor = self.expected_records *": "divisor = len(self._table[1]) *",
        },
        ("test_statistics::test_the_model_is_made_of_releases_and_public_constants",),
    ),
    Fault(
        "sums-over-the-true-number",
        "As much, for the sums by class.",
        _SUMS,
        {
            "(self.expected_records * self": "(len(self._table[1]) * self",
        },
        ("test_statistics::test_the_model_is_made_of_releases_and_public_constants",),
    ),
    Fault(
        "statistics-charged-after-the-draw",
        "Noise is drawn before it is paid for.",
        _TEACHER,
        {
            '            noise = self.paid(ledger, mechanism, 1, "statistics")\n': (
                '            noise = self.noise_source.stream("statistics", number)\n'
                "            noisy = self.drawn(number, mechanism, exact, noise)\n"
                '            self.paid(ledger, mechanism, 1, "statistics")\n'
            ),
            "            self._charged += 1\n            noisy = self.drawn(number, mechanism, exact, noise)\n": (
                "            self._charged += 1\n"
            ),
        },
        ("test_statistics_releases::test_a_refused_charge_draws_nothing",),
    ),
    Fault(
        "penalty-from-private-records",
        "λ follows the number of private records.",
        _TEACHER,
        {
            "divisor = self.expected_records *": "divisor = len(self._table[1]) *",
        },
        ("test_statistics::test_the_model_is_made_of_releases_and_public_constants",),
    ),
    Fault(
        "releases-drawn-again-after-a-resume",
        "A resumed run draws what it has drawn before, beyond its plan.",
        _TEACHER,
        {
            "ledger.charged(kind) for kind in {part.mechanism for part in self.plan(1, 1, 2)}": "0 for kind in self.plan(1, 1, 2)",
        },
        ("test_statistics_releases::test_a_release_that_was_paid_for_and_lost_is_not_drawn_again",),
    ),
    Fault(
        "another-ledger-pays-nothing",
        "A teacher that is used again gives its old releases under a ledger that never paid for them.",
        _TEACHER,
        {
            "if self._paid_by is not ledger:": "if self._paid_by is None:",
        },
        ("test_statistics_releases::test_another_ledger_pays_anew",),
    ),
    Fault(
        "attributes-charged-as-classes",
        "Sums of signs are charged for one class that changes, and all attributes of a replaced record may.",
        _SUMS,
        {
            "max(2.0, self.targets.farthest * longest)": "max(2.0, math.sqrt(2.0) * longest)",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "signed-votes-charged-as-votes",
        "As much, for votes of attributes at public centres.",
        _SUMS,
        {
            "return self.targets.farthest": "return math.sqrt(2.0)",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "attributes-clipped-one-by-one",
        "Each attribute's gradient is clipped by itself, so that a record moves the sum by √a norms.",
        _CURVATURE,
        {
            "norms = errors.norm(dim=1) * inputs.norm(dim=1)": "norms = errors.abs().amax(dim=1) * inputs.norm(dim=1)",
            "kept = not_too_long(squares, clip_norm, self.step(release))": "kept = squares > -1",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "unclipped-gradients-statistics",
        "Gradients are not clipped.",
        _CURVATURE,
        {
            "clip_factors(norms, clip_norm)": "clip_factors(norms, 100.0)",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "clipped-by-the-errors-alone",
        "The length of a record's features is left out of its gradient's norm.",
        _CURVATURE,
        {
            "norms = errors.norm(dim=1) * inputs.norm(dim=1)": "norms = errors.norm(dim=1)",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "replaced-records-pay-once-curvature",
        "A replaced record is charged one gradient, where two differ.",
        _CURVATURE,
        {
            '(1.0 if self.adjacency == "add_remove" else 2.0)': "1.0",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "replaced-records-pay-once-sums",
        "A replaced record is charged as one that is added.",
        _SUMS,
        {
            'if self.adjacency == "add_remove":\n            return longest': "if True:\n            return longest",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "replaced-votes-pay-once",
        "A replaced record is charged one set of votes.",
        _SUMS,
        {
            'if self.adjacency == "add_remove":\n            return 1.0': "if True:\n            return 1.0",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "bias-without-a-price",
        "The constant beside the features is left out of the sensitivity.",
        _SUMS,
        {
            "longest = math.sqrt(1 + self.bias**2)": "longest = 1.0",
        },
        ("test_statistics::test_no_neighbour_moves_a_sum_by_more_than_its_sensitivity",),
    ),
    Fault(
        "one-of-many-releases-planned",
        "The promise covers one release of many.",
        _TEACHER,
        {
            "for release in range(self.releases)).values()": "for release in range(1)).values()",
        },
        ("test_statistics::test_cost_is_that_of_one_gaussian",),
    ),
    Fault(
        "noise-calibrated-for-one-release",
        "A target ε is met by one release of many.",
        _TEACHER,
        {
            'check_open_unit("delta", delta), 1.0, self.releases)': 'check_open_unit("delta", delta), 1.0, 1)',
        },
        ("test_statistics::test_epsilon_is_met_and_not_undershot",),
    ),
    Fault(
        "centred-by-private-features",
        "Every record's features depend on all others by way of their mean.",
        _TEACHER,
        {
            "yield self.inputs(part), classes": "yield self.inputs(part - features.mean(dim=0)), classes",
        },
        ("test_statistics::test_soft_votes_are_kernel_weights_of_unit_length",),
    ),
    Fault(
        "prototypes-likeness-unbounded",
        "A record's likeness to a public example is not cut off at 1.",
        "pl_privknn.labelers.statistics.prototypes",
        {
            "total.index_add_(0, labels, likeness.clamp(0.0, 1.0))": "total.index_add_(0, labels, likeness.clamp(0.0))",
        },
        ("test_prototypes::test_utilities_are_clipped_cosines_of_a_class_s_records",),
    ),
    Fault(
        "prototypes-swaps-paid-as-votes",
        "A replaced record, which moves a choice both ways, is paid for as an added one.",
        "pl_privknn.labelers.statistics.prototypes",
        {
            'REACH = {"add_remove": 1.0, "replace_one": 2.0}': 'REACH = {"add_remove": 1.0, "replace_one": 1.0}',
        },
        ("test_prototypes::test_no_neighbour_is_told_apart_by_more_than_is_charged[replace_one]",),
    ),
    Fault(
        "student-features-from-private-images",
        "What stands in front of a student learns from the private images, and leaves with it.",
        "pl_privknn.students.module",
        {"self.fit_public(public)": "self.fit_public(data.private)"},
        ("test_student_on_features::test_the_network_sees_what_features_and_public_mean_give",),
    ),
)
