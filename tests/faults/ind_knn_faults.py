"""Faults in Ind-KNN: what each record pays, and what it may not do with nothing left."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "every-group-has-the-largest-budget",
        "Records whose owners chose a small ε spend as much as others.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "np.clip(self.parameters.quanta(limits) - (whole - left), 0.0, left)": "left",
        },
        ("test_ind_knn_groups::test_the_stream_costs_the_largest_and_each_record_at_most_its_own",),
    ),
    Fault(
        "numbers-of-records-in-the-configuration",
        "What tells private records apart is written into a run's config.yaml.",
        "pl_privknn.init_arguments",
        {
            "    if not (field.repr or given is None or isinstance(given, str | Path)):": "    if False:",
        },
        ("test_ind_knn_groups::test_what_tells_records_apart_stands_in_no_configuration",),
    ),
    Fault(
        "exhausted-records-vote",
        "A record that has nothing left goes on voting.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "        if left[record] < count_cost:\n            continue\n": (
                "        if left[record] < count_cost:\n"
                "            votes[labels[record]] += kappa[place]\n"
                "            continue\n"
            ),
        },
        ("test_ind_knn::test_spent_records_give_nothing_away",),
    ),
    Fault(
        "exhausted-records-are-counted",
        "A record that has nothing left goes on being counted.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "        if left[record] >= count_cost:\n            active += 1": "        if left[record] >= 0:\n            active += 1",
        },
        ("test_ind_knn::test_spent_records_give_nothing_away",),
    ),
    Fault(
        "last-votes-not-cut",
        "A record's last vote is larger than what it has left pays for.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            (
                "contribution = min(contribution, deviation * math.sqrt(2 * quantum * after_count) * "
                "_CUT_MARGIN)"
            ): "contribution = kappa[place]",
        },
        ("test_ind_knn_core::test_equals_whole_arrays",),
    ),
    Fault(
        "votes-half-paid",
        "Votes are paid at half their price.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "share * share / 2 / quantum": "share * share / 4 / quantum",
        },
        ("test_ind_knn_core::test_equals_whole_arrays",),
    ),
    Fault(
        "counting-half-paid",
        "Being counted is paid at half its price.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "return 1 / (2 * self.sigma1**2)": "return 1 / (4 * self.sigma1**2)",
        },
        ("test_ind_knn::test_equals_the_printed_algorithm_where_products_are_exact",),
    ),
    Fault(
        "counting-free",
        "Being counted costs nothing.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "after_count = left[record] - count_cost": "after_count = left[record]",
        },
        ("test_ind_knn_core::test_equals_whole_arrays",),
    ),
    Fault(
        "costs-rounded-down",
        "Costs are rounded down to whole quanta.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "paid = np.ceil(share": "paid = np.floor(share",
        },
        ("test_ind_knn_core::test_equals_whole_arrays",),
    ),
    Fault(
        "half-noise-votes-ind-knn",
        "Votes carry half the noise that records pay for.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "public_votes + deviation * draws[1:])": "public_votes + deviation / 2 * draws[1:])",
        },
        ("test_ind_knn::test_noise_has_the_stated_deviations",),
    ),
    Fault(
        "half-noise-count-ind-knn",
        "The number of neighbours carries half its noise.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "num_public + parameters.sigma1 * float(draws[0])": "num_public + parameters.sigma1 / 2 * float(draws[0])",
        },
        ("test_ind_knn::test_noise_has_the_stated_deviations",),
    ),
    Fault(
        "noise-of-the-exact-count",
        "The noise on votes follows the exact number of neighbours.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "deviation = parameters.sigma2 * math.sqrt(count)\n": "deviation = parameters.sigma2 * math.sqrt(max(len(near), 1))\n",
        },
        ("test_ind_knn::test_equals_the_printed_algorithm_where_products_are_exact[cosine-0.375-False]",),
    ),
    Fault(
        "one-draw-for-count-and-votes",
        "The count's noise is used again for the votes.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "public_votes + deviation * draws[1:])": "public_votes + deviation * draws[0])",
        },
        ("test_ind_knn::test_equals_the_printed_algorithm_where_products_are_exact[cosine-0.375-False]",),
    ),
    Fault(
        "no-answer-where-nobody-is-near",
        "That nobody is near is told for nothing.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "    deviation = parameters.sigma2 * math.sqrt(count)\n    return": "    deviation = parameters.sigma2 * math.sqrt(count) if len(near) else 0.0\n    return",
        },
        ("test_ind_knn_core::test_nobody_near_is_noise_alone",),
    ),
    Fault(
        "stream-charged-at-half",
        "The ledger is charged half of the budgets' Gaussian-DP parameter.",
        "pl_privknn.labelers.ind_knn.algorithm",
        {
            "return FixedTotal(mu=math.sqrt(2 * self.budget))": "return FixedTotal(mu=math.sqrt(self.budget / 2))",
        },
        ("test_ind_knn_labeler::test_the_ledger_entry_is_the_stated_epsilon",),
    ),
    Fault(
        "thresholds-from-private-density",
        "A query's threshold follows the density of private records.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "self.switches.density.thresholds(self.parameters, (part @ self.reference.T).numpy())": "self.switches.density.thresholds(self.parameters, (part @ self.table.vectors.T).numpy())",
        },
        ("test_ind_knn_labeler::test_thresholds_follow_public_density_alone",),
    ),
    Fault(
        "rows-centred-by-private-mean",
        "Who is near depends on the mean of all records.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "self.table.append(ids, unit_rows(features, overwrite": "self.table.append(ids, unit_rows(features - features.mean(dim=0), overwrite",
        },
        ("test_ind_knn::test_equals_the_printed_algorithm_on_random_features",),
    ),
    Fault(
        "answers-before-their-payment",
        "A batch whose budgets could not be written is let out.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "            self.pay(before)\n": (
                "            try:\n"
                "                self.pay(before)\n"
                "            except RuntimeError:\n"
                "                pass\n"
            ),
        },
        ("test_ind_knn_saved::test_nothing_comes_out_when_the_budgets_cannot_be_written",),
    ),
    Fault(
        "payments-forgotten",
        "What was spent reaches memory and not the lasting budgets.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "        paying = np.flatnonzero(spent)\n": "        paying = np.flatnonzero(spent)[:0]\n",
        },
        ("test_ind_knn_predictor::test_a_record_that_comes_back_has_what_it_had_left",),
    ),
    Fault(
        "held-back-on-exact-votes",
        "An answer is held back where nobody was near.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "labels[query] = self._decide(released.noisy, released.count)": "labels[query] = self._decide(released.noisy, released.count) if len(near) else -1",
        },
        ("test_ind_knn::test_nobody_near_goes_through_the_same_noise",),
    ),
    Fault(
        "one-draw-for-all-queries-ind-knn",
        "All queries of a batch share their noise.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "                draws[query],\n": "                draws[0],\n",
        },
        ("test_ind_knn::test_equals_the_printed_algorithm_on_random_features",),
    ),
    Fault(
        "answers-beyond-the-cap-ind-knn",
        "More answers than were asked for.",
        "pl_privknn.labelers.ind_knn.labeler",
        {
            "asked = queries[:max_answers]": "asked = queries",
        },
        ("test_ind_knn_labeler::test_soft_answers_caps_and_held_back_answers",),
    ),
    Fault(
        "removed-record-goes-on",
        "A record that was taken out goes on voting.",
        "pl_privknn.labelers.ind_knn.predictor",
        {
            "                self._engine.remove(numbers)\n": "                self._engine.budgets.remove(numbers)\n",
        },
        ("test_ind_knn_predictor::test_changes_leave_no_trace_in_later_answers",),
    ),
    Fault(
        "removed-record-stays-on-disk",
        "A record that was taken out stays in the folder.",
        "pl_privknn.labelers.ind_knn.record_store",
        {
            '        for array in ("features", "labels", "alive"):': '        for array in ("alive",):',
        },
        ("test_ind_knn_saved::test_killed_at_any_point_nothing_is_forgotten",),
    ),
    Fault(
        "removed-record-stays-in-memory",
        "A removed record's vector stays in its row.",
        "pl_privknn.labelers.ind_knn.private_table",
        {
            "        self._vectors[count : self._count] = 0\n": "",
        },
        ("test_ind_knn_predictor::test_changes_leave_no_trace_in_later_answers",),
    ),
    Fault(
        "second-stream-unpaid",
        "A new process starts new budgets under the old entry.",
        "pl_privknn.labelers.ind_knn.stream",
        {
            "        if paid <= runs.get(run, 0):": "        if paid < 1:",
        },
        ("test_ind_knn_labeler::test_a_new_process_without_a_folder_pays_again",),
    ),
    Fault(
        "older-budgets-go-on",
        "Budgets that were put back from a copy are spent again.",
        "pl_privknn.labelers.ind_knn.stream",
        {
            "if noted is not None and not self.budgets.has_mark(noted):": "if False:",
        },
        ("test_ind_knn_resume::test_a_run_whose_private_folder_is_lost_or_older_is_refused",),
    ),
    Fault(
        "lost-budgets-start-afresh",
        "A run whose budgets are gone goes on with full ones.",
        "pl_privknn.labelers.ind_knn.stream",
        {
            "        if self._file is not None and not self._knows(ledger):": "        if False:",
        },
        ("test_ind_knn_restored::test_a_lost_state_is_refused_and_a_new_run_charges_anew",),
    ),
    Fault(
        "second-copy-of-budgets",
        "Two copies of a folder each spend the same budgets.",
        "pl_privknn.labelers.ind_knn.stream",
        {
            'if separate and read_json(beside).get("stream") == self.budgets.name:': "if False:",
        },
        ("test_ind_knn_restored::test_a_second_copy_is_refused_and_a_moved_folder_goes_on",),
    ),
    Fault(
        "stream-does-not-vouch",
        "The ledger does not learn how far the budgets have come.",
        "pl_privknn.labelers.ind_knn.stream",
        {
            "            ledger.note(self._topic, self.budgets.mark)": "            pass",
        },
        ("test_ind_knn_resume::test_a_run_whose_private_folder_is_lost_or_older_is_refused",),
    ),
    Fault(
        "budgets-by-position",
        "A reordered table gives every record another record's budget.",
        "pl_privknn.labelers.ind_knn.labeler_budgets",
        {
            "            numbers, following = self.key.numbers(own)\n": "            numbers, following = np.arange(len(own)), np.arange(0)\n",
        },
        ("test_ind_knn_identity::test_reordered_and_shorter_tables_keep_each_records_budget",),
    ),
    Fault(
        "exchanged-records-accepted",
        "New records in the place of spent ones bring new budgets under the old charge.",
        "pl_privknn.labelers.ind_knn.labeler_budgets",
        {
            "        if not np.isin(numbers, known).all():": "        if False:",
        },
        ("test_ind_knn_identity::test_exchanged_records_are_refused_or_new",),
    ),
    Fault(
        "owners-numbers-moved",
        "Numbers in another order than the records give each another's budget.",
        "pl_privknn.labelers.ind_knn.labeler_budgets",
        {
            "if begun and changed_numbers(self._known, now):": "if False:",
        },
        (
            "test_ind_knn_identity::test_numbers_that_moved_are_noticed_where_the_data_module_shows_the_records",
        ),
    ),
    Fault(
        "digests-without-a-key",
        "Whoever guesses a record finds it by its digest.",
        "pl_privknn.privacy.per_record.record_key",
        {
            "hashlib.blake2b(data, key=self.key, digest_size=size)": "hashlib.blake2b(data, digest_size=size)",
        },
        ("test_ind_knn_records::test_a_digest_is_of_one_record_alone_and_of_all_of_it",),
    ),
    Fault(
        "predictor-draws-unpaid",
        "A predictor with a ledger does not charge it.",
        "pl_privknn.labelers.ind_knn.predictor",
        {
            (
                "        self._state = StreamState(IndividualFilter(parameters.budget), None)\n"
                "        self._pay()\n"
            ): "        self._state = StreamState(IndividualFilter(parameters.budget), None)\n",
        },
        ("test_ind_knn_predictor::test_images_need_an_extractor_and_a_ledger_is_charged_once",),
    ),
)
