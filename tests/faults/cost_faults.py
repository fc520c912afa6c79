"""Faults in what single mechanisms cost, and in plans made of them."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "equal-charges-merge-to-one",
        "Equal charges of two rounds count once.",
        "pl_privknn.privacy.mechanisms.base",
        {
            "known.count + charge.count": "max(known.count, charge.count)",
        },
        ("test_accountant::test_equal_charges_are_merged",),
    ),
    Fault(
        "merging-drops-a-mark",
        "Seeded noise merged with cryptographic noise becomes unconditional.",
        "pl_privknn.privacy.mechanisms.base",
        {
            "known.marked(charge.mark)": "known",
        },
        ("test_guarantee::test_a_marked_charge_keeps_its_mark_in_records_sums_and_reports",),
    ),
    Fault(
        "records-drop-marks",
        "A charge's record forgets what weakens its guarantee.",
        "pl_privknn.privacy.mechanisms.base",
        {
            'return {**self.mechanism.to_record(), "count": self.count, **marks}': 'return {**self.mechanism.to_record(), "count": self.count}',
        },
        ("test_guarantee::test_a_marked_charge_keeps_its_mark_in_records_sums_and_reports",),
    ),
    Fault(
        "conditional-mechanisms-called-unconditional",
        "Votes of a partition that depends on all records are called unconditional.",
        "pl_privknn.privacy.mechanisms.conditional",
        {
            '    guarantee: ClassVar[Level] = "conditional"': '    guarantee: ClassVar[Level] = "unconditional"',
        },
        ("test_further_mechanisms::test_a_conditional_part_makes_the_total_conditional_and_is_named",),
    ),
    Fault(
        "data-dependent-called-unconditional",
        "A figure that depends on private votes is stated as a promise.",
        "pl_privknn.privacy.mechanisms.data_dependent",
        {
            '    guarantee = "conditional"': '    guarantee = "unconditional"',
        },
        (
            (
                "test_further_mechanisms::test_data_dependent_costs_are_lower_where_votes_agree_and_always_c"
                "onditional"
            ),
        ),
    ),
    Fault(
        "screening-family-too-small",
        "Samples that hold few records are left out of the screening's family.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "return 0 if self.sampling_rate < 1 else -(-self.k // self.num_classes)": "return -(-self.k // self.num_classes)",
        },
        ("test_screening_tables::test_a_sample_may_hold_fewer_records_and_its_counts_stay",),
    ),
    Fault(
        "exact-screening-accounted-as-continuous",
        "Discrete noise is drawn, the continuous tail accounted.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "        if not self.secure:\n            margin": "        if True:\n            margin",
        },
        ("test_secure_noise::test_secure_screening_accounts_for_the_discrete_tail",),
    ),
    Fault(
        "swapped-votes-cost-added-ones",
        "A vote that moves is charged as one that comes.",
        "pl_privknn.privacy.mechanisms.argmax",
        {
            '(1.0 if self.votes == "add" else 2.0) / self.scale': "1.0 / self.scale",
        },
        ("test_mechanisms::test_argmax_rdp_bounds_every_vote_vector_closely",),
    ),
    Fault(
        "added-votes-under-replacement",
        "A replaced record is charged as an added one.",
        "pl_privknn.privacy.mechanisms.argmax",
        {
            'if adjacency == "replace_one" and self.votes == "add":': "if False:",
        },
        ("test_mechanisms::test_added_votes_are_no_replacement",),
    ),
    Fault(
        "sampling-under-replacement",
        "Sampled releases are charged under replace_one, where the pair does not bound them.",
        "pl_privknn.privacy.mechanisms.base",
        {
            'if adjacency == "replace_one" and sampling_rate < 1:': "if False:",
        },
        ("test_mechanisms::test_sampling_under_replace_one_is_refused",),
    ),
    Fault(
        "inverse-scale-laplace-account",
        "The Laplace mechanism is accounted with scale 1/b.",
        "pl_privknn.privacy.mechanisms.laplace",
        {
            "return _rdp(self.l1_sensitivity / self.scale, self.sampling_rate, orders)": "return _rdp(self.l1_sensitivity * self.scale, self.sampling_rate, orders)",
        },
        ("test_mechanisms::test_laplace_rdp_equals_dp_accounting",),
    ),
    Fault(
        "randomized-response-one-place",
        "A message that differs in many places is charged as if it differed in one.",
        "pl_privknn.privacy.mechanisms.randomized_response",
        {
            "for _ in range(self.differing):": "for _ in range(1):",
            "np.arange(-self.differing, self.differing + 1)": "np.arange(-1, 2)",
        },
        ("test_local_mechanisms::test_randomized_bits_add_up",),
    ),
    Fault(
        "randomized-response-whole-epsilon-each",
        "Every bit of a message gets the ε of the whole message.",
        "pl_privknn.privacy.mechanisms.randomized_response",
        {
            "math.exp(epsilon / differing)": "math.exp(epsilon)",
        },
        ("test_reverse_knn_local::test_randomised_response_is_private_for_the_whole_message",),
    ),
    Fault(
        "shuffling-finds-more-clones",
        "More clients are taken to hide a message than do.",
        "pl_privknn.privacy.mechanisms.shuffle",
        {
            "clone = math.exp(-local)": "clone = math.exp(-local / 2)",
        },
        ("test_local_mechanisms::test_shuffling_equals_enumeration_of_the_clones",),
    ),
    Fault(
        "shares-under-replacement",
        "A replaced record's shuffled messages are charged as an added one's.",
        "pl_privknn.privacy.mechanisms.negative_binomial",
        {
            '    if adjacency == "add_remove":\n        return total': "    if adjacency:\n        return total",
        },
        ("test_reverse_knn_shuffle::test_negative_binomial_costs_the_hockey_stick_of_its_cells",),
    ),
    Fault(
        "shares-hide-a-missing-vote",
        "A cell without any noise shows a missing vote for certain, and counts as nothing.",
        "pl_privknn.privacy.mechanisms.negative_binomial",
        {
            "np.concatenate([[none + 2 * _REST], without, [0.0]])": "np.concatenate([[0.0], without, [0.0]])",
        },
        ("test_reverse_knn_shuffle::test_negative_binomial_costs_the_hockey_stick_of_its_cells",),
    ),
    Fault(
        "calibration-overshoots",
        "The noise that is found costs more than the target.",
        "pl_privknn.privacy.accounting.calibration",
        {
            "if self._epsilon(cost, middle) <= self.target:": "if self._epsilon(cost, middle) <= 1.05 * self.target:",
            "    if report.epsilon > epsilon:": "    if False:",
        },
        ("test_calibration::test_the_target_is_never_passed",),
    ),
    Fault(
        "plans-count-one-answer",
        "Plans of teachers cover one answer.",
        "pl_privknn.planning.planner",
        {
            "o.max_answers or queries": "1",
        },
        ("test_calibration::test_the_configuration_charges_what_was_planned",),
    ),
    Fault(
        "plans-of-one-round",
        "Plans of reverse kNN cover one round.",
        "pl_privknn.planning.planner",
        {
            "o.num_classes, rounds=o.rounds)": "o.num_classes, rounds=1)",
        },
        ("test_calibration::test_the_configuration_of_reverse_knn_charges_what_was_planned",),
    ),
    Fault(
        "plans-of-replacement",
        "Plans of reverse kNN count a replaced record as an added one.",
        "pl_privknn.planning.makers",
        {
            'return {} if o.adjacency == "add_remove" else {"adjacency": o.adjacency}': "return {}",
        },
        ("test_calibration::test_the_configuration_of_reverse_knn_charges_what_was_planned",),
    ),
    Fault(
        "steps-truncated",
        "The last steps of the last epoch are not planned.",
        "pl_privknn.planning.makers",
        {
            "-(-int(o.epochs) * records // batch)": "int(o.epochs) * (records // batch)",
        },
        ("test_calibration::test_steps_cover_every_epoch",),
    ),
    Fault(
        "adjacencies-composed",
        "Figures under different adjacencies are added up.",
        "pl_privknn.privacy.ledger.audit",
        {
            "if len(set(stated.values())) > 1:": "if False:",
        },
        ("test_release_files::test_mixed_adjacencies_and_deltas_are_refused",),
    ),
    Fault(
        "individual-budget-doubled",
        "Every record of Ind-KNN may spend twice the budget of the stated ε.",
        "pl_privknn.privacy.per_record.budgets",
        {
            "mu = math.sqrt(2 * budget)": "mu = math.sqrt(budget)",
        },
        ("test_individual::test_budget_of_epsilon_one",),
    ),
    Fault(
        "audit-never-violated",
        "The empirical audit finds nothing.",
        "pl_privknn.privacy.auditing.lower_bound",
        {
            "violated=empirical > claimed or excess > 0,": "violated=empirical > 3 * claimed,",
        },
        ("test_empirical_audit_command::test_the_command_fails_where_less_noise_is_drawn",),
    ),
)
