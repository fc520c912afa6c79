"""Faults in noisy SGD: clipping, batches, steps, resumes."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "half-noise-steps",
        "Each step of noisy SGD draws half the noise.",
        "pl_privknn.privacy.noisy_steps",
        {
            "return self.mechanism.add_noise(gradients, noise.stream": "return self.mechanism.add_noise(2 * gradients, noise.stream",
        },
        ("test_noisy_sgd_teacher::test_without_noise_it_is_plain_gradient_descent",),
    ),
    Fault(
        "noise-of-the-multiplier-alone",
        "The noise forgets the clipping norm.",
        "pl_privknn.privacy.noisy_steps",
        {
            "return Gaussian(multiplier * norm, norm,": "return Gaussian(multiplier, 1.0,",
        },
        ("test_noisy_sgd_steps::test_noise_has_the_charged_deviation_and_does_not_stack",),
    ),
    Fault(
        "steps-share-their-noise",
        "Steps of one charge draw the same noise from a seed.",
        "pl_privknn.privacy.noisy_steps",
        {
            'noise.stream("step", self.row, self._paid)': 'noise.stream("step", self.row)',
        },
        ("test_noisy_sgd_steps::test_noise_has_the_charged_deviation_and_does_not_stack",),
    ),
    Fault(
        "one-step-paid-for-many",
        "A row of the ledger pays for one step and covers twenty.",
        "pl_privknn.privacy.noisy_steps",
        {
            "self._ledger.charge(self.mechanism, releases, noise": "self._ledger.charge(self.mechanism, 1, noise",
        },
        ("test_noisy_sgd_steps::test_one_object_draws_and_accounts_and_rows_add_up_to_the_steps",),
    ),
    Fault(
        "steps-beyond-the-plan",
        "Training goes on when the planned steps are done.",
        "pl_privknn.privacy.noisy_steps",
        {
            "        if self.left <= 0:": "        if self.left <= -5:",
            "count = min(self._together, self.left)": "count = self._together",
        },
        ("test_noisy_sgd_steps::test_one_object_draws_and_accounts_and_rows_add_up_to_the_steps",),
    ),
    Fault(
        "paid-after-the-noise",
        "A step's noise is drawn before its row is on disk.",
        "pl_privknn.privacy.noisy_steps",
        {
            "        self.pay(noise)\n": (
                '        drawn = self.mechanism.add_noise(gradients, noise.stream("step", self.row, self._paid))\n'
                "        self.pay(noise)\n"
            ),
            'return self.mechanism.add_noise(gradients, noise.stream("step", self.row, self._paid))': "return drawn",
        },
        ("test_noisy_sgd_steps::test_every_step_is_on_disk_before_its_noise",),
    ),
    Fault(
        "batches-of-fixed-size",
        "Batches of a fixed size are accounted as Poisson batches.",
        "pl_privknn.privacy.noisy_steps",
        {
            "return torch.nonzero(noise.bernoulli((count,), sampling_rate)).flatten()": "return noise.uniform((count,)).argsort()[: round(sampling_rate * count)].sort().values",
        },
        ("test_noisy_sgd_steps::test_poisson_samples_have_the_stated_rate_and_random_sizes",),
    ),
    Fault(
        "batches-at-double-rate",
        "Records take part twice as often as accounted.",
        "pl_privknn.privacy.noisy_steps",
        {
            "noise.bernoulli((count,), sampling_rate)": "noise.bernoulli((count,), min(1.0, 2 * sampling_rate))",
        },
        ("test_noisy_sgd_steps::test_poisson_samples_have_the_stated_rate_and_random_sizes",),
    ),
    Fault(
        "gradients-not-clipped",
        "A record moves the model at will.",
        "pl_privknn.privacy.noisy_steps",
        {
            "factors = (clip_norm * _INSIDE / norms).clamp(max=1.0)": "factors = torch.ones_like(norms)",
        },
        ("test_noisy_sgd_clipping::test_clip_factors",),
    ),
    Fault(
        "gradients-normalised-beyond-the-norm",
        "Clipped gradients are half again as long as the bound.",
        "pl_privknn.privacy.noisy_steps",
        {
            "_INSIDE = 1.0 - 1e-5": "_INSIDE = 1.5",
        },
        ("test_noisy_sgd_clipping::test_clip_factors",),
    ),
    Fault(
        "broken-gradients-pass",
        "One record with an infinite gradient spoils, and so marks, a release.",
        "pl_privknn.privacy.noisy_steps",
        {
            "return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))": "return factors",
        },
        ("test_noisy_sgd_clipping::test_clip_factors",),
    ),
    Fault(
        "bias-left-out-of-the-norm",
        "Biases are clipped by a norm that does not count them.",
        "pl_privknn.training.clipping",
        {
            "for gradient in gradients])\n            norms = by_parameter.norm(dim=0)": (
                "for gradient in gradients])\n"
                "            norms = by_parameter[[p.ndim > 1 for p in self.parameters]].norm(dim=0)"
            ),
        },
        ("test_noisy_sgd_clipping::test_clipped_sum_equals_a_loop_over_examples",),
    ),
    Fault(
        "clipped-layer-by-layer",
        "Each layer is clipped to the whole norm.",
        "pl_privknn.training.clipping",
        {
            "return [factors @ gradient for gradient in gradients]": (
                "return [clip_factors(gradient.norm(dim=1), self.clip_norm) @ gradient for gradient in "
                "gradients]"
            ),
        },
        ("test_noisy_sgd_clipping::test_no_example_moves_the_sum_by_more_than_the_clipping_norm",),
    ),
    Fault(
        "sum-clipped-instead-of-each",
        "The sum of a batch is clipped, and no record's part in it.",
        "pl_privknn.training.clipping",
        {
            "return [factors @ gradient for gradient in gradients]": (
                "total = [gradient.sum(dim=0) for gradient in gradients]\n"
                "            length = torch.stack([piece.norm() for piece in total]).norm()\n"
                "            return [piece * (self.clip_norm / length).clamp(max=1.0) for piece in total]"
            ),
        },
        ("test_noisy_sgd_clipping::test_clipped_sum_equals_a_loop_over_examples",),
    ),
    Fault(
        "clipped-by-physical-batch",
        "Each physical batch is clipped as if it were one record of the mean gradient.",
        "pl_privknn.training.clipping",
        {
            "factors = clip_factors(norms, self.clip_norm)\n            return": "factors = clip_factors(norms.mean().expand(len(norms)), self.clip_norm)\n            return",
        },
        ("test_noisy_sgd_clipping::test_clipped_sum_equals_a_loop_over_examples",),
    ),
    Fault(
        "ghost-clipping-of-a-tied-weight",
        "A weight that is used twice loses a part of its gradient under ghost clipping.",
        "pl_privknn.training.network_checks",
        {
            "        if bool(wrong.any()):": "        if False:",
            "        if float((total - kept * directions).norm()) >": "        if self.tolerance < 0 and float((total - kept * directions).norm()) >",
        },
        ("test_network_checks::test_networks_in_which_no_gradient_belongs_to_one_example_are_refused",),
    ),
    Fault(
        "networks-that-mix-examples",
        "A network gives every record a part in every gradient.",
        "pl_privknn.training.network_checks",
        {
            "        if not self._same(self.outputs[place : place + 1], made):": "        if False:",
        },
        ("test_network_checks::test_a_layer_that_mixes_is_named",),
    ),
    Fault(
        "divided-by-the-true-batch-size",
        "The update tells how many records were drawn.",
        "pl_privknn.baselines.noisy_sgd",
        {
            "            gradient = self.session.release(total)": (
                "            gradient = self.session.release(total) * self.session.batch_size / max(1, len(batch.labels))"
            ),
        },
        ("test_noisy_sgd_steps::test_empty_batches_are_noise_only_steps",),
    ),
    Fault(
        "private-loss-logged",
        "The loss of private records is logged at every step.",
        "pl_privknn.baselines.noisy_sgd",
        {
            "            gradient = self.session.release(total)": (
                "            gradient = self.session.release(total)\n"
                '            self.log("train/gradient", total.norm())'
            ),
        },
        ("test_noisy_sgd::test_checkpoints_and_logs_hold_nothing_private",),
    ),
    Fault(
        "gradient-without-noise",
        "The noise is drawn, paid for, and not used.",
        "pl_privknn.baselines.noisy_sgd",
        {
            "            gradient = self.session.release(total)": (
                "            self.session.release(total)\n"
                "            gradient = total / self.session.batch_size"
            ),
        },
        ("test_noisy_sgd_steps::test_empty_batches_are_noise_only_steps",),
    ),
    Fault(
        "features-whitened-by-private-images",
        "Features are centred and scaled by private statistics.",
        "pl_privknn.baselines.noisy_sgd",
        {
            "self.fit_public(data.public)": "self.fit_public(data.private)",
        },
        ("test_noisy_sgd::test_features_are_normalised_by_public_images_only",),
    ),
    Fault(
        "batch-in-the-checkpoint",
        "The last private batch lies in every checkpoint.",
        "pl_privknn.baselines.noisy_sgd",
        {
            '            checkpoint["noisy_sgd"] = self.session.run.state()': (
                '            checkpoint["noisy_sgd"] = {**self.session.run.state(), "records": '
                "self.session.private.records[0]}"
            ),
        },
        ("test_noisy_sgd::test_checkpoints_and_logs_hold_nothing_private",),
    ),
    Fault(
        "resume-starts-the-plan-again",
        "A resumed training makes all planned steps anew.",
        "pl_privknn.training.training_run",
        {
            "max(0, self.planned - before)": "self.planned",
        },
        ("test_noisy_sgd_resume::test_resume_keeps_epsilon_exact_and_never_spends_less_than_was_drawn",),
    ),
    Fault(
        "resume-with-an-older-ledger",
        "Steps that were drawn are missing in the ledger.",
        "pl_privknn.training.training_run",
        {
            'if checkpoint is not None and charged < checkpoint["charged"]:': "if False:",
            "        if found and noted.head is not None:": "        if False:",
        },
        ("test_noisy_sgd_resume::test_a_missing_or_older_ledger_is_refused",),
    ),
    Fault(
        "resume-with-other-parameters",
        "A training goes on with less noise than its plan states.",
        "pl_privknn.training.training_run",
        {
            'if found["plan"].get(name) != value': 'if found["plan"].get(name) != value and False',
        },
        ("test_noisy_sgd_resume::test_other_privacy_parameters_on_resume_are_refused",),
    ),
    Fault(
        "accumulated-batches-accepted",
        "Several batches make one step, which is accounted as one batch.",
        "pl_privknn.training.trainer_checks",
        {
            "    if options.accumulate_grad_batches != 1:": "    if False:",
        },
        ("test_noisy_sgd::test_trainers_that_break_the_accounting_are_refused",),
    ),
    Fault(
        "teacher-bias-left-out-of-the-norm",
        "The column of ones is left out of the clipping norm.",
        "pl_privknn.labelers.noisy_sgd",
        {
            "norms = errors.norm(dim=1) * inputs.norm(dim=1)": "norms = errors.norm(dim=1) * vectors.norm(dim=1)",
        },
        ("test_noisy_sgd_teacher::test_gradients_equal_a_loop_over_examples",),
    ),
    Fault(
        "teacher-gradients-not-clipped",
        "A record moves the teacher at will.",
        "pl_privknn.labelers.noisy_sgd",
        {
            "return errors * clip_factors(norms, clip_norm)[:, None], inputs": "return errors, inputs",
        },
        ("test_noisy_sgd_teacher::test_no_record_moves_the_sum_by_more_than_the_clipping_norm",),
    ),
    Fault(
        "teacher-whitened-by-private-features",
        "The teacher's features are centred by the private table.",
        "pl_privknn.labelers.noisy_sgd",
        {
            "change = self._change(queries)\n": "change = self._change(self._table[0])\n",
        },
        ("test_noisy_sgd_teacher::test_without_noise_it_is_plain_gradient_descent",),
    ),
    Fault(
        "teacher-plans-one-round",
        "The promise covers one round of the teacher's training.",
        "pl_privknn.labelers.noisy_sgd",
        {
            "return [Charge(self.mechanism, self.steps * rounds)]": "return [Charge(self.mechanism, self.steps)]",
        },
        ("test_charges::test_rounds_stay_within_their_plan[noisy_sgd]",),
    ),
    Fault(
        "teacher-calibrated-for-one-round",
        "The noise for a target is found for one round, however many there are.",
        "pl_privknn.labelers.noisy_sgd",
        {
            "self.steps * self.rounds,": "self.steps,",
        },
        ("test_noisy_sgd_teacher::test_target_is_met_and_agrees_with_opacus",),
    ),
    Fault(
        "teacher-one-sample-for-all-steps",
        "All steps look at one sample.",
        "pl_privknn.labelers.noisy_sgd",
        {
            '.stream("batch", row, left, *': '.stream("batch", *',
        },
        ("test_noisy_sgd_teacher::test_every_step_is_paid_before_its_noise_and_nothing_else",),
    ),
)
