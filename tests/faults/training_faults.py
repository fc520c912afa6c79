"""Faults in the private training of any LightningModule: its batches, its gradients, what it logs."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "noise-scaled-by-the-true-batch",
        "The update is divided by the number of records drawn, which is private.",
        "pl_privknn.training.private_training",
        {
            "released = self.session.release(total)": (
                "released = self.session.release(total) * self.session.batch_size / max(1, len(images))"
            ),
        },
        ("test_private_training::test_a_noiseless_update_is_that_of_each_example_clipped",),
    ),
    Fault(
        "clipping-after-averaging",
        "Each example's gradient is divided by the batch before it is clipped, so that none is.",
        "pl_privknn.training.clipping",
        {
            "return losses.sum() if losses.ndim else losses * count": "return losses.sum() if losses.ndim else losses",
        },
        ("test_private_training::test_a_noiseless_update_is_that_of_each_example_clipped",),
    ),
    Fault(
        "shuffled-batches",
        "The loader shuffles and cuts, as ordinary ones do, and is accounted as Poisson sampling.",
        "pl_privknn.datamodules.formats.poisson_loader",
        {
            "        for _ in range(self.steps):\n            yield poisson_sample(self.count, self.sampling_rate, coins).tolist()": (
                "        order = coins.uniform((self.count,)).argsort()\n"
                "        for part in order.tensor_split(self.steps):\n"
                "            yield part.sort().values.tolist()"
            ),
        },
        ("test_noisy_sgd_steps::test_poisson_samples_have_the_stated_rate_and_random_sizes",),
    ),
    Fault(
        "spent-by-the-plan",
        "What was spent is taken from the planned steps and not from those that were paid.",
        "pl_privknn.training.training_run",
        {
            "return self.plan.steps_of(releases, self.planned)": "return self.planned if charges else 0",
        },
        ("test_kill::test_resume_keeps_epsilon_exact_and_never_spends_less_than_was_drawn",),
    ),
    Fault(
        "private-loss-passes",
        "What training_step logs of private records reaches the loggers.",
        "pl_privknn.training.module_guard",
        {
            "        if self._inside:\n            return False\n        if not self.module": "        if self._inside or not self.module",
        },
        ("test_private_training::test_only_epsilon_and_validation_are_logged_and_epsilon_at_every_step",),
    ),
    Fault(
        "private-metric-stays",
        "A metric keeps the counts of private batches.",
        "pl_privknn.training.module_guard",
        {
            "                    metric.reset()": "                    pass",
        },
        ("test_private_training::test_only_epsilon_and_validation_are_logged_and_epsilon_at_every_step",),
    ),
    Fault(
        "a-batch-released-twice",
        "An optimizer gets two noisy gradients of one sample, accounted as two samples.",
        "pl_privknn.datamodules.formats.poisson_loader",
        {
            "        if self._is_taken:": "        if False:",
            "records[:0].clone(), labels[:0].clone()": "records, labels",
        },
        ("test_private_training::test_an_optimizer_that_looks_twice_at_a_batch_is_stopped",),
    ),
    Fault(
        "thawed-without-noise",
        "Parameters that thaw later are trained by their raw gradients.",
        "pl_privknn.training.step_gradients",
        {
            "        if [id(p) for p in module": "        if not self.parameters and [id(p) for p in module",
        },
        ("test_private_training::test_parameters_that_thaw_later_are_refused",),
    ),
    Fault(
        "norms-rounded-to-sixteen-bits",
        "A norm in 16 bits lets gradients pass the bound.",
        "pl_privknn.training.clipping",
        {
            "return gradients.float() if gradients.dtype in": "return gradients if gradients.dtype in",
        },
        ("test_private_training::test_sixteen_bits_do_not_lengthen_a_clipped_gradient",),
    ),
    Fault(
        "a-loss-that-is-no-mean",
        "A loss that weighs examples by each other is taken for a mean.",
        "pl_privknn.training.step_checks",
        {
            "        if self._same(self.outputs, alone.mean().reshape(1)):": "        if True:",
        },
        ("test_refusals::test_what_breaks_the_guarantee_is_refused_before_a_record_is_read",),
    ),
    Fault(
        "outputs-stay-on-the-module",
        "A module keeps what it made of private records.",
        "pl_privknn.training.step_checks",
        {
            "if before.get(name, ()) != value]": "if before is None]",
        },
        ("test_refusals::test_what_breaks_the_guarantee_is_refused_before_a_record_is_read",),
    ),
    Fault(
        "early-stopping-by-private-loss",
        "Training waits for a figure of private records.",
        "pl_privknn.training.module_checks",
        {
            "        if monitor in private:": "        if False:",
        },
        ("test_refusals::test_callbacks_that_wait_for_private_figures_are_refused",),
    ),
    Fault(
        "layers-clipped-to-the-whole-norm",
        "Each layer is clipped to the norm that all of them share.",
        "pl_privknn.training.clipping",
        {
            "share = self.clip_norm / len(set(layers)) ** 0.5": "share = self.clip_norm",
        },
        (
            "test_private_training::test_no_record_moves_the_sum_by_more_than_the_norm_and_broken_ones_not_at_all",
        ),
    ),
    Fault(
        "ghost-norms-in-sixteen-bits",
        "Ghost clipping goes by norms that were rounded to 16 bits.",
        "pl_privknn.training.trainer_checks",
        {
            'if clipping == "ghost" and "16" in': 'if clipping == "none" and "16" in',
        },
        ("test_private_training::test_norms_of_other_draws_and_rounded_norms_are_refused",),
    ),
    Fault(
        "views-summed",
        "An example with several views has several gradients, of which each is clipped by itself.",
        "pl_privknn.training.clipping",
        {
            "rows if self.views == 1 else rows.view(count, self.views, -1).mean(dim=1))": (
                "torch.nn.functional.normalize(rows).view(count, self.views, -1).sum(dim=1))"
            ),
        },
        ("test_private_training::test_views_of_an_example_are_one_clipped_gradient",),
    ),
    Fault(
        "unpaid-adaptive-clipping",
        "The count of unclipped gradients goes with each step and the step's charge is for the gradients alone.",
        "pl_privknn.training.adaptive_clipping",
        {
            "self._of_sum, self._of_count = math.sqrt(1 - share)": "self._of_sum, self._of_count = 1.0",
        },
        ("test_paid_figures::test_sum_and_count_of_one_record_are_no_longer_than_what_is_charged",),
    ),
    Fault(
        "norm-from-the-true-share",
        "The clipping norm moves by the share of unclipped gradients without noise.",
        "pl_privknn.training.adaptive_clipping",
        {
            "        scaled = noisy / self.unit\n": "        scaled = noisy / self.unit\n        scaled[-1] = 0.0\n",
        },
        ("test_paid_figures::test_gradients_and_count_have_the_noise_that_the_charge_pays_for",),
    ),
    Fault(
        "unpaid-accuracy",
        "An accuracy on private records is released and the ledger knows nothing of it.",
        "pl_privknn.training.training_run",
        {
            'paid(self._run, noise, mechanism, 1, "accuracy", ("add_remove",))': 'noise.stream("accuracy", self.num_charges)',
        },
        ("test_paid_figures::test_an_accuracy_is_that_of_the_records_at_its_step_and_has_its_own_charge",),
    ),
    Fault(
        "accuracy-beside-the-budget",
        "The noise is found for the steps alone, and accuracies come on top of it.",
        "pl_privknn.privacy.noisy_steps",
        {
            "rate), count), *others],": "rate), count)],",
        },
        ("test_paid_figures::test_epsilon_is_for_steps_and_accuracies_together",),
    ),
    Fault(
        "predictions-that-meet",
        "One record may change the predictions of many.",
        "pl_privknn.training.paid_accuracy",
        {
            "    if not torch.allclose(together, alone": "    if False and not torch.allclose(together, alone",
        },
        ("test_paid_figures::test_predictions_that_are_no_record_s_own_are_refused_before_a_charge",),
    ),
    Fault(
        "search-for-the-price-of-one",
        "The best of many candidates costs what one of them does.",
        "pl_privknn.privacy.mechanisms.repeat_and_select",
        {
            "made = one + log_mean / (grid - 1) + constant": "made = one + 0 * constant",
        },
        ("test_repeat_and_select::test_epsilon_is_that_of_dp_accounting",),
    ),
    Fault(
        "as-many-candidates-as-expected",
        "The number of candidates is fixed, and the bound is for a random one.",
        "pl_privknn.privacy.mechanisms.repeat_and_select",
        {
            "while not bool(noise.bernoulli(1, 1 / self.mean)):": "while count < self.mean:",
        },
        ("test_repeat_and_select::test_counts_are_geometric",),
    ),
    Fault(
        "best-by-the-true-score",
        "The score that decides, and is released, has no noise.",
        "pl_privknn.comparison.tuning_run",
        {
            'self.tuning.score.add_noise(right, self.noise.stream("score", place))': "right",
        },
        ("test_tuning::test_the_best_is_released_alone_and_the_search_is_one_charge",),
    ),
    Fault(
        "losers-stay-on-disk",
        "Candidates that were not chosen, and how many there were, lie beside the best.",
        "pl_privknn.comparison.tuning_run",
        {
            "        shutil.rmtree(self.output / _SECRET)\n": "",
        },
        ("test_tuning::test_the_best_is_released_alone_and_the_search_is_one_charge",),
    ),
)
