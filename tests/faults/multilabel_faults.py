"""Faults in teachers of attributes and of numbers."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "one-vote-more-multilabel",
        "A record gives its attributes to k + 1 queries and is charged k.",
        "pl_privknn.labelers.multilabel.reverse_knn",
        {
            "for rank in range(self.k):": "for rank in range(nearest.shape[1]):",
            "assign(self._features, queries, self.k, ": "assign(self._features, queries, min(self.k + 1, len(queries)), ",
        },
        ("test_multilabel::test_reverse_knn_moves_within_its_sensitivity",),
    ),
    Fault(
        "replaced-record-charged-once-multilabel",
        "As much for attributes.",
        "pl_privknn.labelers.multilabel.reverse_knn",
        {
            'moved = 2 if self.adjacency == "replace_one" else 1': "moved = 1",
        },
        ("test_multilabel::test_reverse_knn_moves_within_its_sensitivity",),
    ),
    Fault(
        "one-round-planned-for-two-multilabel",
        "As much for attributes.",
        "pl_privknn.labelers.multilabel.reverse_knn",
        {
            "return [Charge(self.mechanism(num_classes), rounds)]": "return [Charge(self.mechanism(num_classes), 1)]",
        },
        ("test_charges::test_rounds_stay_within_their_plan[multilabel_reverse_knn]",),
    ),
    Fault(
        "coins-at-a-higher-rate-sums",
        "Neighbours of multi-label teachers take part more often than accounted.",
        "pl_privknn.neighbors.poisson",
        {
            "return toss(coins, indices.shape, self.sampling_rate)": "return toss(coins, indices.shape, min(1.0, 1.5 * self.sampling_rate))",
        },
        ("test_multilabel_rules::test_sums_are_those_of_literal_samples",),
    ),
    Fault(
        "k-plus-one-neighbours-sums",
        "One neighbour more adds to the sums.",
        "pl_privknn.neighbors.poisson",
        {
            "need = self.k - taken[row]": "need = self.k + 1 - taken[row]",
        },
        ("test_multilabel_rules::test_sums_are_those_of_literal_samples",),
    ),
    Fault(
        "unclipped-votes-reverse-knn",
        "A record with many attributes moves the table more than is charged.",
        "pl_privknn.labelers.multilabel.reverse_knn",
        {
            "features, clip_attributes(labels, self.tau)": "features, labels.double()",
        },
        ("test_multilabel::test_reverse_knn_moves_within_its_sensitivity",),
    ),
    Fault(
        "clipping-that-does-not-clip",
        "Clipped votes are longer than τ.",
        "pl_privknn.labelers.multilabel.votes",
        {
            "keepdim=True).clamp(min=1.0)).clamp(max=1.0)": "keepdim=True).clamp(min=1.0).sqrt()).clamp(max=1.0)",
        },
        ("test_multilabel_rules::test_norms_are_those_of_all_pairs_of_label_vectors",),
    ),
    Fault(
        "swapped-vectors-count-once",
        "A neighbour that pushes another one out is charged one vector.",
        "pl_privknn.labelers.multilabel.knn",
        {
            "l1, l2 = swapped_vote_norms(self.tau, num_attributes)": (
                "from pl_privknn.labelers.multilabel.votes import single_vote_norms\n"
                "        l1, l2 = single_vote_norms(self.tau, num_attributes)"
            ),
        },
        ("test_multilabel::test_knn_charges_what_it_draws",),
    ),
    Fault(
        "presence-not-charged",
        "The vote that says 'here is a record' is free.",
        "pl_privknn.labelers.multilabel.reverse_knn",
        {
            "moved * self.k * (l1 + 1), math.sqrt(moved * self.k * (l2**2 + 1))": "moved * self.k * l1, math.sqrt(moved * self.k * l2**2)",
        },
        ("test_multilabel::test_reverse_knn_moves_within_its_sensitivity",),
    ),
    Fault(
        "half-noise-multilabel",
        "Attributes are answered with half the noise.",
        "pl_privknn.labelers.aggregation",
        {
            "return asked, self.additive.add_noise(private, noise)": "return asked, self.additive.add_noise(2 * private, noise)",
        },
        ("test_multilabel::test_noise_of_the_sums_has_the_charged_deviation",),
    ),
    Fault(
        "answers-beyond-the-cap-multilabel",
        "More attribute answers than the plan has.",
        "pl_privknn.labelers.aggregation",
        {
            "asked = asked[:max_answers]": "asked = asked[:]",
        },
        ("test_charges::test_rounds_stay_within_their_plan[multilabel_knn]",),
    ),
    Fault(
        "attribute-answers-charged-once",
        "A batch of attribute answers is paid for as one.",
        "pl_privknn.labelers.aggregation",
        {
            "noise = pay(self.noise, len(asked), self.key)": "noise = pay(self.noise, 1, self.key)",
        },
        ("test_multilabel::test_knn_charges_what_it_draws",),
    ),
    Fault(
        "rule-sees-exact-sums",
        "Attributes are decided on sums without noise.",
        "pl_privknn.labelers.multilabel.votes",
        {
            "decided = decide(noisy, mechanism.deviation)": "from pl_privknn.privacy.noise import SystemNoise; decided = decide(votes(answered, SystemNoise()), mechanism.deviation)",
        },
        ("test_multilabel::test_noise_of_the_sums_has_the_charged_deviation",),
    ),
    Fault(
        "unclipped-targets",
        "One record far beyond the bounds moves the mean at will.",
        "pl_privknn.labelers.regression",
        {
            "clipped = targets.double().clamp(self.low, self.high)": "clipped = targets.double()",
        },
        ("test_private_regression::test_one_record_moves_the_sum_by_the_width_at_most",),
    ),
    Fault(
        "half-width-charged",
        "A target that replaces another is charged half of the bounds' width.",
        "pl_privknn.labelers.regression",
        {
            "sum_noise(noise, width, width,": "sum_noise(noise, width / 2, width / 2,",
        },
        ("test_private_regression::test_one_record_moves_the_sum_by_the_width_at_most",),
    ),
    Fault(
        "bounds-from-private-targets",
        "The bounds follow the private targets.",
        "pl_privknn.labelers.regression",
        {
            "        clipped = targets": (
                "        self.low, self.high = float(targets.min()), float(targets.max())\n"
                "        clipped = targets"
            ),
        },
        ("test_private_regression::test_answers_follow_the_targets",),
    ),
    Fault(
        "half-noise-regression",
        "Means carry half the noise.",
        "pl_privknn.labelers.regression",
        {
            'return sums if self.statistic == "mean"': 'return 2 * sums if self.statistic == "mean"',
            "released[:, 0] / self.k": "released[:, 0] / (2 * self.k)",
        },
        ("test_private_regression::test_noise_of_the_mean",),
    ),
    Fault(
        "regression-pays-once",
        "Many answers about numbers are paid for as one.",
        "pl_privknn.labelers.regression",
        {
            "self.noise_source, mechanism, count, key": "self.noise_source, mechanism, 1, key",
        },
        ("test_private_regression::test_answers_follow_the_targets",),
    ),
)
