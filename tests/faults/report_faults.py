"""Faults in guarantees, reports, and the budgets of single records."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "attack-accuses-the-honest",
        "An attack counts one right guess more than there was.",
        "pl_privknn.attacks.guessing",
        {
            "tail = float(bdtrc(right - 1, made, likely))": "tail = float(bdtrc(right, made, likely))",
        },
        ("test_guessing::test_delta_term_is_the_papers[30]",),
    ),
    Fault(
        "attack-counts-runs-twice",
        "Every call of an attack draws the same seeded noise, so that few runs count for many.",
        "pl_privknn.attacks.many_runs",
        {
            "release = _asked(labeler, canaries.queries, count, paying)": "release = _asked(labeler, canaries.queries, count, ledger())",
        },
        ("test_attack::test_runs_of_one_seed_have_noise_of_their_own",),
    ),
    Fault(
        "attack-holds-no-parts",
        "An attack on PATE deals all records out anew, and takes that for what one record does.",
        "pl_privknn.attacks.many_runs",
        {
            "made.partitioner = GivenParts(parts)": "pass",
        },
        ("test_attack::test_pate_with_the_other_parts_held",),
    ),
    Fault(
        "attack-sees-no-shared-noise",
        "An attack looks at sums over queries alone, in which noise that they share hides.",
        "pl_privknn.attacks.verdicts",
        {
            "contrasts = [pair for pair in sides.contrasts if any(bool(np.any(side)) for side in pair)]": "contrasts: list[Any] = []",
            "natural, shared = _noisy_by_nature(stated), bool(np.any(scored.contrast))": "natural, shared = _noisy_by_nature(stated), False",
        },
        ("test_attack::test_noise_that_queries_share_is_found",),
    ),
    Fault(
        "attack-forgets-what-is-known",
        "An attack on released sums leaves in what the other records add to them.",
        "pl_privknn.labelers.statistics.audited",
        {
            "rest = taken.noisy - known.exact_sum(number, taken.weights)": "rest = taken.noisy",
        },
        ("test_attack::test_what_other_records_add_to_a_release_is_taken_out",),
    ),
    Fault(
        "attack-breach-of-the-lucky",
        "What an attack would find is said of the luckiest of its resamplings, and not of all.",
        "pl_privknn.attacks.verdicts",
        {
            "if all(noticed(factor, random) for _ in range(_RESAMPLINGS)):": "if any(noticed(factor, random) for _ in range(_RESAMPLINGS)):",
        },
        ("test_attack::test_the_smallest_breach_is_found_about_as_often_as_stated",),
    ),
    Fault(
        "attack-canaries-within-the-norm",
        "Gradients of canaries are as long as the clipping norm, so that missing clipping is not found.",
        "pl_privknn.attacks.training",
        {
            "_LENGTH = 100.0": "_LENGTH = 1.0",
        },
        ("test_training_attack::test_missing_clipping_and_shared_noise_are_found",),
    ),
    Fault(
        "attack-knows-no-draws",
        "An attack on a training leaves in what the other records add to its sums.",
        "pl_privknn.attacks.training",
        {
            "self._others = self._sum(inputs[others], targets[others], *rest).cpu()": "self._others = torch.zeros(self._gradients.size)",
        },
        ("test_training_attack::test_without_noise_every_coin_of_a_canary_that_was_drawn_is_seen[NoisySGD]",),
    ),
    Fault(
        "attack-event-of-a-known-rate",
        "A test of two shares takes the false-positive rate for that which was seen, and accuses the honest.",
        "pl_privknn.attacks.events",
        {
            "edges = np.linspace(low, high, _PIECES + 1)": "edges = np.full(_PIECES + 1, away / absent)",
        },
        ("test_events::test_a_true_claim_is_refuted_seldom_at_every_false_positive_rate[60-60-0.5]",),
    ),
    Fault(
        "attack-suspects-honest-noise",
        "Too little noise is looked for by the likelihood of the stated noise alone.",
        "pl_privknn.labelers.sampled_evidence",
        {
            "_SUSPECTED = 0.5": "_SUSPECTED = 1.0",
        },
        ("test_events::test_scores_are_log_likelihood_ratios_of_the_mixture[0.1]",),
    ),
    Fault(
        "attack-accuses-honest-trainings",
        "An attack on a training tests each score at three times the error.",
        "pl_privknn.attacks.alone",
        {
            "each = 1 - (1 - confidence) / len(_LEVELS)": "each = 1 - 3 * (1 - confidence)",
        },
        ("test_events::test_an_honest_training_is_accused_in_the_stated_share_of_repetitions[1.0]",),
    ),
    Fault(
        "attack-spends-real-budgets",
        "An attack on Ind-KNN spends the budgets of the real records, which lie in their folder.",
        "pl_privknn.attacks.target",
        {
            '_MEMORIES = ("state_dir", "ids", "cache")': '_MEMORIES = ("cache",)',
        },
        ("test_attack::test_an_attack_leaves_the_budgets_of_the_real_records_alone",),
    ),
    Fault(
        "note-speaks-of-epsilon",
        "A note in the ledger says what ε the summary should have.",
        "pl_privknn.privacy.ledger.summary_check",
        {
            "found |= {name: counts[name] for name in _COUNTED if name in counts}": "found |= counts",
        },
        ("test_summary_check::test_a_note_in_the_ledger_speaks_of_queries_alone",),
    ),
    Fault(
        "attack-asked-one-way",
        "The best attack is stated for the direction in which a sampled record shows less.",
        "pl_privknn.privacy.accounting.tradeoff",
        {
            "return np.max([np.min(way, axis=0) for way in ways], axis=0)": "return np.min([np.min(way, axis=0) for way in ways], axis=0)",
        },
        ("test_tradeoff::test_sampled_release_differs_by_direction[0.5]",),
    ),
    Fault(
        "attack-rates-forget-mass",
        "Outcomes that give the record away are left out of the best attack's rate.",
        "pl_privknn.privacy.accounting.tradeoff",
        {
            "found = np.minimum(found + ahead.infinity, 1.0)": "found = np.minimum(found, 1.0)",
        },
        ("test_tradeoff::test_nothing_and_everything",),
    ),
    Fault(
        "guarantee-of-the-strongest",
        "One unconditional part makes the whole unconditional.",
        "pl_privknn.privacy.guarantee",
        {
            "level = LEVELS[max(LEVELS.index": "level = LEVELS[min(LEVELS.index",
        },
        ("test_guarantee::test_a_marked_charge_keeps_its_mark_in_records_sums_and_reports",),
    ),
    Fault(
        "every-noise-is-good",
        "Plans on seeded noise are called unconditional.",
        "pl_privknn.privacy.guarantee",
        {
            'return UNCONDITIONAL if source.cryptographic else Guarantee("none", (SEEDED_NOISE,))': "return UNCONDITIONAL",
        },
        ("test_guarantee::test_a_marked_charge_keeps_its_mark_in_records_sums_and_reports",),
    ),
    Fault(
        "late-runs-forget-it",
        "A late run's own report is unconditional.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "[*run.charged.values()], run.late, delta, exact": "[*run.charged.values()], [], delta, exact",
        },
        ("test_ledger::test_parameters_chosen_after_a_release_make_the_figure_conditional",),
    ),
    Fault(
        "export-drops-marks",
        "An exported ledger is unconditional.",
        "pl_privknn.privacy.ledger.audit",
        {
            "return [charge.to_record() for charge in charges]": "return [Charge(charge.mechanism, charge.count).to_record() for charge in charges]",
        },
        ("test_guarantee::test_no_chain_of_doors_raises_a_guarantee_or_lowers_epsilon[1]",),
    ),
    Fault(
        "several-files-unconditional",
        "Files that know nothing of each other are called one plan.",
        "pl_privknn.privacy.ledger.audit",
        {
            "    if len(parts) > 1:": "    if len(parts) > 99:",
        },
        ("test_guarantee::test_no_chain_of_doors_raises_a_guarantee_or_lowers_epsilon[2]",),
    ),
    Fault(
        "several-files-of-what-was-charged",
        "Of several ledgers only what was charged counts, not what was promised.",
        "pl_privknn.privacy.ledger.audit",
        {
            "charge for name in ledger.runs for charge in ledger.run_report(name, exact=False).guaranteed": "charge for name in ledger.runs for charge in ledger.run_report(name, exact=False).charged",
        },
        ("test_release_files::test_files_over_the_same_data_compose",),
    ),
    Fault(
        "noted-head-not-looked-for",
        "An audit with a head that was noted elsewhere accepts an older copy.",
        "pl_privknn.privacy.ledger.audit",
        {
            "        if head is not None:\n            ledger.check_head": "        if False:\n            ledger.check_head",
        },
        ("test_report::test_a_head_noted_earlier_finds_rewritten_and_older_files",),
    ),
    Fault(
        "individual-costs-rounded-down",
        "Costs below a unit of the budget are free.",
        "pl_privknn.privacy.per_record.budgets",
        {
            "np.minimum(np.ceil(np.ldexp(amounts, self._shift)), 2.0**self._BITS)": "np.minimum(np.floor(np.ldexp(amounts, self._shift)), 2.0**self._BITS)",
            "return np.maximum(units, amounts > 0)": "return units",
        },
        ("test_individual::test_tiny_costs_are_never_free",),
    ),
    Fault(
        "individual-budget-passed",
        "A record pays more than its budget.",
        "pl_privknn.privacy.per_record.filter",
        {
            "over = units > left": "over = units > 2 * left",
        },
        ("test_individual::test_clip_and_exclude",),
    ),
    Fault(
        "excluded-records-pay-all",
        "A record that can't pay is told that it paid, and takes part.",
        "pl_privknn.privacy.per_record.filter",
        {
            "amounts = np.where(over, self._units.to_amounts(units), amounts)": "pass",
        },
        ("test_individual::test_clip_and_exclude",),
    ),
    Fault(
        "removed-records-start-afresh",
        "A record that is removed and added again gets a new budget.",
        "pl_privknn.privacy.per_record.table",
        {
            "self.present[slots[known]] = True": "self.present[slots[known]] = True; self.spent[slots[known]] = 0",
        },
        ("test_individual::test_removed_record_keeps_its_spending",),
    ),
    Fault(
        "budgets-not-synced",
        "A power failure gives spent budgets back.",
        "pl_privknn.privacy.per_record.journal",
        {
            "            _write(descriptor, entry)\n            sync(descriptor)": "            _write(descriptor, entry)",
        },
        ("test_synced::test_budgets_are_synced_with_every_change",),
    ),
    Fault(
        "budgets-file-damage-accepted",
        "A damaged file of budgets is read as it stands.",
        "pl_privknn.privacy.per_record.journal",
        {
            "if checksum != zlib.crc32(body, self._checksum):": "if False:",
        },
        ("test_individual_file::test_damage_anywhere_is_refused",),
    ),
    Fault(
        "budgets-opened-twice",
        "Two processes spend the same budgets.",
        "pl_privknn.privacy.per_record.journal",
        {
            "            self._lock.acquire()": "            pass",
        },
        ("test_individual_file::test_second_opening_is_refused_and_frees_nothing",),
    ),
    Fault(
        "older-budgets-accepted",
        "A file of budgets that was put back from a copy counts as up to date.",
        "pl_privknn.privacy.per_record.filter",
        {
            (
                "            return number.isdecimal() and 0 < int(number) <= len(known) and "
                "known[int(number) - 1] == drawn"
            ): "            return number.isdecimal()",
        },
        ("test_individual_file::test_marks_tell_an_older_copy",),
    ),
    Fault(
        "audit-believes-the-summary",
        "A forged summary passes the audit.",
        "pl_privknn.privacy.ledger.summary_check",
        {
            "        agrees = stated == found or math.isclose(stated, found, rel_tol=_ROUNDING)": "        agrees = True",
        },
        ("test_summary_check::test_a_forged_summary_is_found[epsilon]",),
    ),
    Fault(
        "audit-of-a-cut-past",
        "A summary that names an early row hides what was charged later.",
        "pl_privknn.privacy.ledger.summary_check",
        {
            '"agrees": not later': '"agrees": True',
        },
        ("test_summary_check::test_a_summary_from_before_the_last_charge_is_found",),
    ),
    Fault(
        "page-shows-the-summarys-epsilon",
        "A page repeats what a forged summary says.",
        "pl_privknn.report.run_facts",
        {
            "    return facts\n\n\ndef _ledger_of": '    facts["promise"]["epsilon"] = summary["epsilon"]\n    return facts\n\n\ndef _ledger_of',
        },
        ("test_report_page::test_a_forged_summary_is_named_and_the_ledgers_figures_are_shown",),
    ),
    Fault(
        "pictures-of-private-images",
        "A run keeps pictures of private records for its page.",
        "pl_privknn.callbacks.public_pictures",
        {
            "_small(data.public.images(examples))": "_small(data.private.images(examples))",
        },
        ("test_report_page::test_pictures_are_the_asked_public_images_and_no_private_one",),
    ),
    Fault(
        "attackers-rate-without-delta",
        "A page understates what an attacker can detect.",
        "pl_privknn.report.promise",
        {
            "math.exp(min(epsilon, 700.0)) * fpr + delta": "math.exp(min(epsilon, 700.0)) * fpr",
        },
        ("test_report_page::test_the_attackers_rates_are_those_of_the_worst_pair[1.0-0.01]",),
    ),
)
