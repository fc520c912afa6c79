"""Faults where a private training has parts: several processes, groups of records, subsets with correlated noise."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "noise-in-each-process",
        "Every process adds noise to its own sum, scaled as if it were the only one.",
        "pl_privknn.training.session",
        {
            "whole = processes.sum(values)": (
                "whole = processes.sum(run.steps.mechanism.add_noise(values, self.noise_source) if processes.count > 1 "
                "and isinstance(run, TrainingRun) else values)"
            ),
        },
        ("test_processes::test_several_processes_train_as_one_and_pay_as_one",),
    ),
    Fault(
        "processes-toss-the-same-coins",
        "Records of different processes are drawn together.",
        "pl_privknn.training.session",
        {
            '*(("rank", rank) if rank else ())': "*(() if rank else ())",
        },
        ("test_processes::test_shares_of_the_records_are_disjoint_and_their_coins_independent",),
    ),
    Fault(
        "every-process-draws-from-all-records",
        "With several processes a record takes part in a step several times.",
        "pl_privknn.datamodules.formats.poisson_loader",
        {
            "[share[0] :: share[1]]": "[:]",
        },
        ("test_processes::test_shares_of_the_records_are_disjoint_and_their_coins_independent",),
    ),
    Fault(
        "other-processes-tell-no-cost",
        "A process without the ledger says what was spent at the start for ever.",
        "pl_privknn.training.processes",
        {
            "        if reports is not None:": "        if reports is not None and row < 0:",
        },
        ("test_processes::test_several_processes_train_as_one_and_pay_as_one",),
    ),
    Fault(
        "smallest-group-promised",
        "The ledger, and ε of the training, are those of the group that takes part least.",
        "pl_privknn.training.session",
        {
            "rate, target = max(rates), None": "rate, target = min(rates), None",
        },
        ("test_privacy_groups::test_the_ledger_promises_the_largest_and_the_summary_states_each",),
    ),
    Fault(
        "groups-draw-with-each-other-s-rate",
        "Records whose owners chose a small ε take part as often as others.",
        "pl_privknn.privacy.record_groups",
        {
            "torch.nonzero(members == group)": "torch.nonzero(members != group)",
        },
        ("test_privacy_groups::test_a_record_is_drawn_with_the_rate_of_its_group_and_alone",),
    ),
    Fault(
        "members-change-groups",
        "A resumed training draws a record with the rate of another group than before.",
        "pl_privknn.training.group_members",
        {
            "groups = members[len(each) : len(each) + len(images), None]": "groups = torch.zeros(len(images), 1).long()",
        },
        ("test_privacy_groups::test_a_training_goes_on_with_its_members_alone",),
    ),
    Fault(
        "members-of-other-rows",
        "With several processes a record has the group of another one.",
        "pl_privknn.datamodules.formats.poisson_loader",
        {
            "return values[self._rows]": "return values[: len(self._rows)]",
        },
        ("test_privacy_groups::test_a_record_is_drawn_with_the_rate_of_its_group_and_alone",),
    ),
    Fault(
        "groups-pay-nothing-for-the-rest",
        "ε of a group leaves out what was released beside the steps.",
        "pl_privknn.privacy.record_groups",
        {
            "account([own, *others], delta": "account([own], delta",
        },
        ("test_privacy_groups::test_what_is_beside_the_steps_counts_in_full_for_every_group",),
    ),
    Fault(
        "columns-longer-than-the-charge",
        "Correlated noise is for columns of norm 1, and those of its matrix are longer.",
        "pl_privknn.training.correlated_noise",
        {
            "norm = math.hypot(*taylor)": "norm = 1.0",
        },
        ("test_correlated_noise::test_coefficients_are_the_banded_square_root_and_far_columns_share_no_row",),
    ),
    Fault(
        "correlated-noise-too-small",
        "The recursion multiplies by the first coefficient instead of dividing by it.",
        "pl_privknn.training.correlated_noise",
        {
            "drawn /= self._first": "drawn *= self._first",
        },
        ("test_correlated_noise::test_noise_is_the_inverse_of_the_matrix_times_independent_noise",),
    ),
    Fault(
        "subsets-by-row",
        "A record that is added or removed moves others to another subset.",
        "pl_privknn.training.correlated_noise",
        {
            "return coins.integers((count,), self.bands)": "return torch.arange(count) % self.bands",
        },
        ("test_correlated_noise::test_a_record_s_subset_hangs_on_no_other_record",),
    ),
    Fault(
        "cycles-at-the-rate-of-all-records",
        "Steps draw from their subset at its rate, and are charged at that of all records.",
        "pl_privknn.training.session",
        {
            "            rate = self.correlated_noise.rate(rate)\n": "            rate = rate + 0.0\n",
            "rate = self.correlated_noise.bands, plan.sampling_rate": "rate = self.correlated_noise.bands, self.correlated_noise.rate(plan.sampling_rate)",
        },
        ("test_correlated_noise::test_epsilon_is_that_of_a_sampled_gaussian_a_cycle",),
    ),
    Fault(
        "a-cut-off-cycle-for-nothing",
        "The last cycle of a plan is paid for only where it is whole.",
        "pl_privknn.training.correlated_noise",
        {
            "return math.ceil(steps / self.bands)": "return max(1, steps // self.bands)",
        },
        ("test_correlated_noise::test_epsilon_is_that_of_a_sampled_gaussian_a_cycle",),
    ),
    Fault(
        "a-row-for-many-cycles",
        "A row of the ledger pays for one cycle and covers several.",
        "pl_privknn.privacy.noisy_steps",
        {
            "releases = math.ceil(count / self._cycle)": "releases = 1 if self._cycle > 1 else count",
        },
        ("test_correlated_noise::test_rows_are_for_whole_cycles_and_the_last_one_may_be_cut_off",),
    ),
    Fault(
        "a-resume-within-a-cycle",
        "A resumed training goes on within a cycle that was paid, whose steps some records took part in.",
        "pl_privknn.training.training_plan",
        {
            "return min(most, releases * (1 if self.correlated_noise is None else self.correlated_noise.bands))": "return min(most, releases)",
        },
        (
            "test_correlated_noise::test_a_training_draws_each_subset_in_its_turn_through_epochs_and_power_cuts",
        ),
    ),
    Fault(
        "turns-begin-anew-with-an-epoch",
        "A subset has its turn again before the others had theirs.",
        "pl_privknn.datamodules.formats.poisson_loader",
        {
            "first = self.next_step()": "first = 0",
        },
        ("test_correlated_noise::test_each_step_draws_from_its_own_subset_alone_and_at_the_rate_of_a_cycle",),
    ),
    Fault(
        "a-turn-for-all-records",
        "Every step draws from all records, at the rate for one subset.",
        "pl_privknn.datamodules.formats.poisson_loader",
        {
            "torch.nonzero(self.subsets == step % self.count)": "torch.nonzero(self.subsets >= step % 1)",
        },
        ("test_correlated_noise::test_each_step_draws_from_its_own_subset_alone_and_at_the_rate_of_a_cycle",),
    ),
    Fault(
        "a-batch-of-another-turn",
        "A sample that was drawn for an earlier step is used in a later one.",
        "pl_privknn.training.session",
        {
            "        if self.correlated_noise is not None and step != self.next_step:": "        if self.correlated_noise is None and step is not None:",
        },
        (
            "test_correlated_noise::test_workers_hand_on_the_step_of_a_batch_and_one_that_was_passed_over_is_refused",
        ),
    ),
    Fault(
        "a-search-at-another-rate",
        "Candidates draw from subsets at their rate, and a search pays for them at that of all records.",
        "pl_privknn.comparison.tuning",
        {
            '"groups", "correlated_noise")': '"groups")',
        },
        ("test_tuning::test_what_a_search_can_t_pay_for_is_refused",),
    ),
    Fault(
        "ghost-clipping-skipped",
        "Ghost clipping leaves gradients as they are.",
        "pl_privknn.training.hooks",
        {
            "gradients[chosen] * weights)": "gradients[chosen])",
        },
        (
            "test_noisy_sgd_clipping::test_no_example_moves_the_sum_by_more_than_the_clipping_norm",
            "test_private_training::test_a_noiseless_update_is_that_of_each_example_clipped",
        ),
    ),
    Fault(
        "ghost-sums-of-other-convolutions",
        "The sum is that of a convolution of another dilation than the one whose norms were taken.",
        "pl_privknn.training.hooks",
        {
            "            layer.dilation,\n": "            [1] * len(layer.dilation),\n",
        },
        ("test_noisy_sgd_clipping::test_ghost_sums_of_all_kinds_of_convolutions_equal_a_loop_over_examples",),
    ),
    Fault(
        "a-broken-gradient-times-nothing",
        "A record whose gradient is not finite has a factor of 0, and so makes the sum of all NaN.",
        "pl_privknn.training.hooks",
        {
            "chosen = ... if bool(usable.all()) else usable": "chosen = ...",
        },
        ("test_noisy_sgd_clipping::test_a_record_with_a_broken_gradient_contributes_nothing",),
    ),
    Fault(
        "ghost-sum-of-a-failed-pass",
        "What a pass that failed has kept gets into the sum of the next one, at another record's factor.",
        "pl_privknn.training.hooks",
        {
            "        self._kept = []\n        super().backward(total, named)": "        super().backward(total, named)",
        },
        ("test_noisy_sgd_clipping::test_a_pass_that_failed_leaves_nothing_in_the_next_sum",),
    ),
)
