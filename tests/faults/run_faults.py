"""Faults in whole runs: rounds, stores, resumes, what is logged."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "plan-of-one-round",
        "The promise covers the first round alone.",
        "pl_privknn.callbacks.private_labeler",
        {
            "sum(queries), self._answers(queries), data.num_classes, rounds=sum(map(bool, queries))": "queries[0], min(self._answers(queries), queries[0]), data.num_classes, rounds=1",
        },
        ("test_private_labeler::test_epsilon_is_stated_beforehand_and_covers_the_plan",),
    ),
    Fault(
        "adjacency-of-the-callback-not-checked",
        "A teacher runs under a neighbouring relation for which it has no plan.",
        "pl_privknn.callbacks.round_settings",
        {
            "    if adjacency not in labeler.adjacencies:": "    if False:",
        },
        ("test_private_labeler::test_bad_arguments_are_named",),
    ),
    Fault(
        "query-after-the-last-epoch",
        "Labels are bought that nobody trains on.",
        "pl_privknn.callbacks.private_labeler",
        {
            "or not self._rounds_applied <= index < self.rounds or is_last_epoch(trainer):": "or not self._rounds_applied <= index < self.rounds:",
        },
        ("test_private_labeler::test_no_query_after_the_last_epoch",),
    ),
    Fault(
        "fast-dev-run-asks",
        "A trial run of one batch spends budget.",
        "pl_privknn.callbacks.private_labeler",
        {
            "        if trainer.fast_dev_run:  # type: ignore[attr-defined]\n            rank_zero_info": "        if False:\n            rank_zero_info",
        },
        ("test_private_labeler::test_nothing_is_queried_in_fast_dev_run_validation_and_test",),
    ),
    Fault(
        "lost-answers-not-counted",
        "Answers that a kill took may be given once more.",
        "pl_privknn.callbacks.labeling_round",
        {
            'return self.max_answers - counts["answered"] - counts["lost"]': 'return self.max_answers - counts["answered"]',
        },
        ("test_kill_and_resume::test_sigkill_loses_no_label_and_forgets_no_budget",),
    ),
    Fault(
        "asked-batch-asked-again",
        "After a kill a batch that was paid for is asked, and paid for, again.",
        "pl_privknn.callbacks.label_store",
        {
            '"AND (asked_at IS NULL OR asked_at = ?) ORDER BY position"': '"AND (asked_at IS NULL OR asked_at >= 0 * ?) ORDER BY position"',
        },
        ("test_private_labeler::test_label_store_survives_reopening_and_counts_lost_queries",),
    ),
    Fault(
        "asked-after-the-teacher",
        "A batch is marked as asked after its answers came: a kill in between asks it again.",
        "pl_privknn.callbacks.labeling_round",
        {
            (
                "            store.mark_asked(index, positions, ledger.num_charges)\n"
                "            release = privately(self.labeler.label, features, ledger, "
                "max_answers=answers_left)"
            ): (
                "            release = privately(self.labeler.label, features, ledger, "
                "max_answers=answers_left)\n"
                "            store.mark_asked(index, positions, ledger.num_charges)"
            ),
        },
        ("test_kill_and_resume::test_sigkill_loses_no_label_and_forgets_no_budget",),
    ),
    Fault(
        "queries-chosen-anew",
        "A resumed round chooses its queries again.",
        "pl_privknn.callbacks.labeling_round",
        {
            "        examples = store.selected(index)\n": "        examples = None\n",
        },
        ("test_private_labeler::test_resume_from_a_checkpoint_pays_nothing_twice",),
    ),
    Fault(
        "features-shifted-by-private-mean",
        "The features of queries are centred by the private images.",
        "pl_privknn.callbacks.labeling_round",
        {
            "                features = self._ready(data)(data.public.images(batch))": (
                "                features = self._ready(data)(data.public.images(batch)) - "
                "self.extractor(data.private.images(slice(None))).mean(dim=0)"
            ),
        },
        ("test_non_interference::test_neighbouring_private_sets_leave_the_same_traces[private_knn]",),
    ),
    Fault(
        "queries-chosen-by-truth",
        "Queries are chosen by labels that nobody has released.",
        "pl_privknn.callbacks.labeling_round",
        {
            "            examples = selection.examples.tolist()\n": "            examples = selection.examples.roll(int(data.private.labels.sum())).tolist()\n",
        },
        ("test_non_interference::test_neighbouring_private_sets_leave_the_same_traces[private_knn]",),
    ),
    Fault(
        "store-keeps-private-labels",
        "The file of released labels holds private ones.",
        "pl_privknn.callbacks.labeling_round",
        {
            "        privately(self._fit_labeler, data, private_folder(store.path.parent), progress)\n": (
                "        privately(self._fit_labeler, data, private_folder(store.path.parent), progress)\n"
                '        store.set_meta("table", data.private.labels.tolist())\n'
            ),
        },
        ("test_non_interference::test_neighbouring_private_sets_leave_the_same_traces[private_knn]",),
    ),
    Fault(
        "undeclared-metric",
        "A figure of the private records is logged beside ε.",
        "pl_privknn.callbacks.private_labeler",
        {
            (
                "        return examples, labels, soft, self._run.metrics(data.public.truth, examples, "
                "labels, earlier)"
            ): (
                "        metrics = self._run.metrics(data.public.truth, examples, labels, earlier)\n"
                '        return examples, labels, soft, {**metrics, "labels/private_mean": '
                "float(data.private.labels.double().mean())}"
            ),
        },
        ("test_non_interference::test_neighbouring_private_sets_leave_the_same_traces[private_knn]",),
    ),
    Fault(
        "number-of-records-logged",
        "The number of private records is logged, which is private under add_remove.",
        "pl_privknn.callbacks.private_labeler",
        {
            (
                "        return examples, labels, soft, self._run.metrics(data.public.truth, examples, "
                "labels, earlier)"
            ): (
                "        metrics = self._run.metrics(data.public.truth, examples, labels, earlier)\n"
                '        return examples, labels, soft, {**metrics, "labels/records": '
                "float(len(data.private))}"
            ),
        },
        ("test_non_interference::test_neighbouring_private_sets_leave_the_same_traces[private_knn]",),
    ),
    Fault(
        "teacher-in-the-checkpoint",
        "Checkpoints hold the teacher's private table.",
        "pl_privknn.callbacks.private_labeler",
        {
            '            "restart_due": self._restart_due,\n        }': (
                '            "restart_due": self._restart_due,\n'
                '            "teacher": dict(self.labeler.__dict__),\n'
                "        }"
            ),
        },
        ("test_private_labeler::test_resume_from_a_checkpoint_pays_nothing_twice",),
    ),
    Fault(
        "missing-ledger-starts-anew",
        "A run whose ledger is gone goes on with an empty one.",
        "pl_privknn.callbacks.label_run",
        {
            "        if begun and not path.exists():": "        if False:",
            "        if begun and self.run_id not in ledger.runs:": "        if False:",
            "        self.store.check_ledger(ledger, self.run_id)\n": "",
        },
        ("test_run_folder::test_a_new_or_missing_ledger_is_refused",),
    ),
    Fault(
        "older-ledger-accepted",
        "A ledger that was put back from a copy forgets charges.",
        "pl_privknn.callbacks.label_store",
        {
            "        noted = ledger.check_head(head, str(self.path))\n": "        noted = 0\n        return\n",
        },
        ("test_run_folder::test_an_older_ledger_is_refused",),
    ),
    Fault(
        "older-labels-accepted",
        "A label store that was put back from a copy asks and pays again.",
        "pl_privknn.callbacks.label_store",
        {
            'if unknown > bool(self.get_meta("in_flight")):': "if unknown > 10**6:",
        },
        ("test_run_folder::test_an_older_label_store_is_refused",),
    ),
    Fault(
        "heads-not-noted",
        "Charges are not noted where the labels are.",
        "pl_privknn.callbacks.label_run",
        {
            "            self.ledger.witness(self.store.note_head)\n": "",
        },
        ("test_run_folder::test_an_older_ledger_is_refused",),
    ),
    Fault(
        "witnesses-not-told",
        "A head kept elsewhere stays at the first row.",
        "pl_privknn.privacy.ledger.store",
        {
            "            if self._appended is not None:\n": "            if False:\n",
        },
        ("test_run_folder::test_an_older_ledger_is_refused",),
    ),
    Fault(
        "head-elsewhere-not-checked",
        "A ledger that does not hold the head kept elsewhere is opened.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "                if kept.head is not None:\n                    self.check_head": "                if False:\n                    self.check_head",
        },
        ("test_run_folder::test_a_head_kept_elsewhere_finds_a_whole_folder_that_was_put_back",),
    ),
    Fault(
        "unknown-head-accepted",
        "A head that no row carries is found.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "        if position is None:\n": "        if False:\n",
        },
        ("test_report::test_a_head_noted_earlier_finds_rewritten_and_older_files",),
    ),
    Fault(
        "other-public-data-accepted",
        "Labels of other images count as those of these, and are asked anew.",
        "pl_privknn.callbacks.label_run",
        {
            '"public_examples", "public_digest", "num_classes")': '"public_examples", "num_classes")',
        },
        ("test_run_folder::test_other_public_examples_are_refused",),
    ),
    Fault(
        "other-run-parameters-accepted",
        "A run goes on with less noise than its plan.",
        "pl_privknn.callbacks.label_store",
        {
            "        if differing:\n": "        if False:\n",
        },
        ("test_private_labeler::test_other_privacy_parameters_in_the_same_folder_are_refused",),
    ),
    Fault(
        "folder-not-locked",
        "Two runs ask the same queries in one folder.",
        "pl_privknn.privacy.ledger.run_folder",
        {
            "            self._lock.acquire(timeout=0)\n": "            pass\n",
            "        if self._is_run and self._folder in self._runs:": "        if False:",
        },
        ("test_run_folder::test_one_run_at_a_time_has_a_folder",),
    ),
    Fault(
        "copied-folder-goes-on-in-the-original",
        "A copied run spends in the original's ledger.",
        "pl_privknn.privacy.ledger.run_folder",
        {
            "for folder in (*around, stored):": "for folder in (stored, *around):",
        },
        ("test_run_folder::test_a_checkpoint_is_resumed_in_the_folder_that_it_lies_in",),
    ),
    Fault(
        "report-of-another-delta",
        "The report's ε belongs to a larger δ than the one beside it.",
        "pl_privknn.callbacks.label_run",
        {
            "report = self.ledger.report(delta=self.delta, exact=exact)": "report = self.ledger.report(delta=min(0.5, 100 * self.delta), exact=exact)",
        },
        ("test_private_labeler::test_rounds_come_before_the_first_epoch_and_between_epochs",),
    ),
    Fault(
        "spent-stated-as-the-guarantee",
        "What was spent, which depends on data, is stated as the promise.",
        "pl_privknn.callbacks.label_run",
        {
            "return report.guarantee, report.spent": "return report.spent, report.spent",
        },
        ("test_private_labeler::test_epsilon_is_stated_beforehand_and_covers_the_plan",),
    ),
    Fault(
        "labeler-allows-every-adjacency",
        "Labelers state that their plan holds under any neighbouring relation.",
        "pl_privknn.labelers.base",
        {
            "return paid(ledger, self.noise_source, mechanism, count, key, self.adjacencies)": 'return paid(ledger, self.noise_source, mechanism, count, key, ("add_remove", "replace_one"))',
        },
        ("test_charges::test_labelers_refuse_a_ledger_of_another_adjacency_before_they_draw[private_knn]",),
    ),
    Fault(
        "labeler-plan-without-its-mark",
        "The plan says nothing of seeded noise.",
        "pl_privknn.labelers.base",
        {
            "return [charge.marked(mark) for charge in charges]": "return charges",
        },
        ("test_guarantee::test_plans_say_what_their_noise_leaves_of_them",),
    ),
    Fault(
        "private-value-in-a-message",
        "An error message quotes a private label.",
        "pl_privknn.labelers.base",
        {
            (
                'raise ValueError(f"labels: some lie outside [0, num_classes={num_classes}); remap '
                'them to 0 … c-1")'
            ): (
                'raise ValueError(f"labels: {labels.max()} lies outside [0, '
                'num_classes={num_classes}); remap them to 0 … c-1")'
            ),
        },
        ("test_private_knn::test_bad_arguments_are_named",),
    ),
    Fault(
        "search-reads-the-private-records",
        "A search on public truth loads the private records beside them.",
        "pl_privknn.datamodules.stand_in",
        {
            'self.data.setup("validate")': 'self.data.setup("fit")',
        },
        ("test_search::test_parts_share_no_image_and_the_stand_in_is_repeated",),
    ),
    Fault(
        "search-charges-the-real-ledger",
        "A search keeps the ledger of the run that it is made for.",
        "pl_privknn.comparison.search",
        {
            'for key, value in document["labeling"].items() if key not in _PLACES': (
                'for key, value in document["labeling"].items()'
            ),
        },
        ("test_search::test_all_combinations_run_once_and_the_best_comes_first",),
    ),
    Fault(
        "private-batches-shuffled-into-public",
        "A private image is among the public ones that the student sees.",
        "pl_privknn.datamodules.base",
        {
            "labeled = LabeledBatches(public.store, public.table)": "labeled = LabeledBatches(self.private.store, public.table)",
        },
        ("test_datamodules_labels::test_training_loader_reaches_neither_truth_nor_private_nor_test_data",),
    ),
)
