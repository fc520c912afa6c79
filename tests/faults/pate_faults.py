"""Faults in PATE: parts, teachers, votes."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "half-noise-pate",
        "PATE's answers carry half the noise.",
        "pl_privknn.labelers.aggregation",
        {
            "return asked, self.noise.argmax(private, noise)": "return asked, self.noise.argmax(2 * private, noise)",
        },
        ("test_pate::test_labels_have_the_distribution_of_the_literal_mechanism",),
    ),
    Fault(
        "half-screening-noise-pate",
        "Confident GNMAX screens with half the noise.",
        "pl_privknn.labelers.aggregation",
        {
            "asked = asked[self.screening.passes(": "asked = asked[dataclasses.replace(self.screening, sigma=self.screening.sigma / 2).passes(",
        },
        ("test_pate::test_confident_gnmax_has_the_distribution_of_the_literal_algorithm",),
    ),
    Fault(
        "pate-votes-sensitivity-one",
        "A teacher's changed vote counts once.",
        "pl_privknn.labelers.pate.aggregators",
        {
            "PATE_VOTES_L2 = math.sqrt(2.0)": "PATE_VOTES_L2 = 1.0",
        },
        ("test_pate::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "pate-votes-sensitivity-one-l1",
        "As much, for LNMAX.",
        "pl_privknn.labelers.pate.aggregators",
        {
            "PATE_VOTES_L1 = 2.0": "PATE_VOTES_L1 = 1.0",
        },
        ("test_pate::test_epsilon_of_100_and_250_queries",),
    ),
    Fault(
        "answers-beyond-the-cap-pate",
        "More answers than the plan has.",
        "pl_privknn.labelers.aggregation",
        {
            "asked = asked[:max_answers]": "asked = asked[:]",
        },
        ("test_pate::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "pate-answers-charged-once",
        "A batch of PATE's answers is paid for as one.",
        "pl_privknn.labelers.aggregation",
        {
            "noise = pay(self.noise, len(asked), self.key)": "noise = pay(self.noise, 1, self.key)",
        },
        ("test_pate::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "pate-screening-charged-for-answers",
        "Refused queries are screened for nothing.",
        "pl_privknn.labelers.aggregation",
        {
            'noise = pay(self.screening, num_queries, "screening")': 'noise = pay(self.screening, max(1, num_queries // 2), "screening")',
        },
        ("test_pate::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "condition-not-charged",
        "PATE over guided parts charges without its condition.",
        "pl_privknn.labelers.pate.ensemble",
        {
            "self.paid(ledger, self.partitioner.billed(mechanism), count, key)": "self.paid(ledger, mechanism, count, key)",
        },
        ("test_pate::test_conditional_partitions_mark_every_charge_with_the_reason",),
    ),
    Fault(
        "condition-not-planned",
        "The plan of PATE over guided parts says nothing of its condition.",
        "pl_privknn.labelers.pate.pate",
        {
            "num_queries, max_answers, self.num_teachers, num_classes, self.partitioner.billed\n": "num_queries, max_answers, self.num_teachers, num_classes, lambda mechanism: mechanism\n",
        },
        ("test_guarantee::test_the_condition_of_a_partition_reaches_every_plan_and_charge",),
    ),
    Fault(
        "conditions-dropped",
        "No partition has a condition.",
        "pl_privknn.labelers.pate.partition",
        {
            "return Conditional(mechanism, self.condition) if self.condition else mechanism": "return mechanism",
        },
        ("test_pate::test_conditional_partitions_mark_every_charge_with_the_reason",),
    ),
    Fault(
        "partition-by-row-number",
        "One record less moves all later ones to other teachers.",
        "pl_privknn.labelers.pate.partition",
        {
            "        return noise.integers(units, num_parts)": "        return torch.arange(units) % num_parts",
        },
        ("test_pate_partition::test_random_parts_are_uniform_and_independent_and_read_no_data",),
    ),
    Fault(
        "partition-by-label",
        "A record's teacher depends on how many others have its label.",
        "pl_privknn.labelers.pate.partition",
        {
            "        return self._deal_units(len(labels), num_parts, noise)": (
                "        return (self._deal_units(len(labels), num_parts, noise) + "
                "labels.bincount()[labels]) % num_parts"
            ),
        },
        ("test_pate_partition::test_random_parts_are_uniform_and_independent_and_read_no_data",),
    ),
    Fault(
        "shuffle-partition-under-added-records",
        "A partition that no coupling saves is allowed for added records.",
        "pl_privknn.labelers.pate.partition",
        {
            '    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("replace_one",)': '    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("replace_one", "add_remove")',
        },
        ("test_pate::test_adjacencies_are_the_partitioners",),
    ),
    Fault(
        "groups-torn-apart",
        "A person's records go to several teachers, under a guarantee for the person.",
        "pl_privknn.labelers.pate.partition",
        {
            "parts = self._deal_units(units, num_parts, noise)[groups]": "parts = self._deal_units(len(labels), num_parts, noise)",
        },
        ("test_pate_partition::test_groups_stay_together",),
    ),
    Fault(
        "overlapping-parts",
        "The last record of a part is in the next part too: one record, two votes.",
        "pl_privknn.labelers.pate.teachers",
        {
            "return list(order.split(sizes))": (
                "pieces = list(order.split(sizes))\n"
                "    return [torch.cat([piece, before[:1]]) for piece, before in zip(pieces, "
                "pieces[-1:] + pieces[:-1], strict=True)]"
            ),
        },
        ("test_pate_teachers::test_stacked_training_equals_one_after_another_in_plain_torch",),
    ),
    Fault(
        "teacher-trains-on-two-parts",
        "A record changes two teachers.",
        "pl_privknn.labelers.pate.stacked",
        {
            "_batches(rows[teacher], count": "_batches(torch.cat([rows[teacher], rows[teacher - 1]]), count",
        },
        ("test_pate_teachers::test_a_teacher_is_bit_for_bit_a_function_of_its_own_part",),
    ),
    Fault(
        "first-part-for-all-teachers",
        "Every teacher is trained on the first part: a record in it changes all votes.",
        "pl_privknn.labelers.pate.stacked",
        {
            "_batches(rows[teacher], count": "_batches(rows[0], count",
        },
        ("test_pate_teachers::test_a_teacher_is_bit_for_bit_a_function_of_its_own_part",),
    ),
    Fault(
        "training-as-long-as-the-largest-part",
        "The size of one part changes all teachers.",
        "pl_privknn.labelers.pate.stacked",
        {
            "        rows = rows_of_parts(parts, num_teachers)\n": (
                "        rows = rows_of_parts(parts, num_teachers)\n"
                "        self.learning_rate *= 1 + max(map(len, rows)) / len(labels)\n"
            ),
        },
        ("test_pate_teachers::test_a_teacher_is_bit_for_bit_a_function_of_its_own_part",),
    ),
    Fault(
        "classes-of-all-parts",
        "Whether a teacher may vote for a class depends on other parts.",
        "pl_privknn.labelers.pate.stacked",
        {
            "        known[parts, labels] = True": (
                "        known[parts, labels] = True\n"
                "        known[:, labels] |= known.any(dim=1, keepdim=True)"
            ),
        },
        ("test_pate_teachers::test_empty_part_abstains_and_a_missing_class_is_no_problem",),
    ),
    Fault(
        "failures-quote-records",
        "An estimator's message, which may quote a record, is shown.",
        "pl_privknn.labelers.pate.teachers",
        {
            "failures.add(type(error).__name__)": "failures.add(str(error))",
        },
        ("test_pate::test_a_teacher_that_fails_abstains_or_stops_the_run_without_its_message",),
    ),
    Fault(
        "teachers-in-pickles",
        "Trained teachers, which remember their records, go into copies and checkpoints.",
        "pl_privknn.labelers.pate.ensemble",
        {
            'for name in ("_trained", "_asked", "_answered", "private_groups"):': 'for name in ("_asked", "_answered", "private_groups"):',
        },
        ("test_pate_report::test_pickles_hold_nothing_private",),
    ),
)
