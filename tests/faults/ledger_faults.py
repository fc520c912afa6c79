"""Faults in ledgers: what is written down, promised and checked."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "full-disk-swallowed",
        "A charge that never reached the disk counts as paid, and its noise is drawn.",
        "pl_privknn.privacy.ledger.store",
        {
            """        raise OSError(f"{path} can't be {doing}: {error}. {hint}") from error""": "        pass",
        },
        ("test_ledger_disk::test_a_disk_that_fails_loses_no_charge",),
    ),
    Fault(
        "charge-calls-its-noise-cryptographic",
        "Seeded noise stands in the ledger as cryptographic.",
        "pl_privknn.privacy.ledger.run",
        {
            '"cryptographic" if noise.cryptographic else "seeded"': '"cryptographic"',
        },
        ("test_guarantee::test_no_chain_of_doors_raises_a_guarantee_or_lowers_epsilon[1]",),
    ),
    Fault(
        "unstated-noise-trusted",
        "Charges that say nothing of their noise and adjacency are called unconditional.",
        "pl_privknn.privacy.ledger.balance",
        {
            'None: Guarantee("conditional", (UNSTATED_NOISE,))': "None: Guarantee()",
        },
        ("test_charges::test_charges_that_state_too_little_make_the_ledger_conditional",),
    ),
    Fault(
        "adjacency-not-checked-at-the-charge",
        "A labeler for added records charges a ledger for replaced ones: half of the true ε.",
        "pl_privknn.privacy.ledger.run",
        {
            "if adjacencies is not None and ledger.adjacency not in adjacencies:": "if False:",
        },
        ("test_charges::test_labelers_refuse_a_ledger_of_another_adjacency_before_they_draw[private_knn]",),
    ),
    Fault(
        "adjacency-of-a-ledger-changes",
        "A ledger is continued under another neighbouring relation.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "if self._balance.adjacency != adjacency:": "if False:",
        },
        ("test_ledger::test_adjacency_and_budget_of_a_ledger_stay",),
    ),
    Fault(
        "plan-not-counted",
        "The guarantee is that of what was charged so far, which depends on data.",
        "pl_privknn.privacy.ledger.balance",
        {
            "return larger(self.planned, self.charged)": "return dict(self.charged)",
        },
        ("test_ledger::test_report_at_another_delta",),
    ),
    Fault(
        "charges-beyond-a-plan-not-counted",
        "What was charged beyond the plan does not raise the guarantee.",
        "pl_privknn.privacy.ledger.balance",
        {
            "return larger(self.planned, self.charged)": "return dict(self.planned)",
        },
        ("test_ledger::test_runs_compose_and_each_can_be_seen_alone",),
    ),
    Fault(
        "runs-not-composed",
        "Each run is the only one: ten runs cost as much as the last.",
        "pl_privknn.privacy.ledger.balance",
        {
            "return in_total(parts.values())": "return in_total(list(parts.values())[-1:])",
        },
        ("test_ledger::test_plans_before_the_first_charge_are_composed_and_later_ones_filtered",),
    ),
    Fault(
        "spent-of-one-run",
        "What was spent leaves out all runs but one.",
        "pl_privknn.privacy.ledger.balance",
        {
            "in_total(run.charged for run in self.runs.values())": "in_total([*(run.charged for run in self.runs.values())][:1])",
        },
        ("test_ledger::test_runs_compose_and_each_can_be_seen_alone",),
    ),
    Fault(
        "charge-beyond-the-plan-unchecked",
        "Charges beyond the plan are not held against the budget.",
        "pl_privknn.privacy.ledger.run",
        {
            "if (after := run.after(charge)) is not None:\n                granted": "if (after := run.after(charge)) is not None and not run.planned:\n                granted",
        },
        ("test_ledger::test_budget_refuses_plans_and_charges_before_anything_is_written",),
    ),
    Fault(
        "plan-unchecked",
        "A plan above the budget is accepted.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "if asked := beyond(wanted, granted):": "if (asked := beyond(wanted, granted)) and known:",
        },
        ("test_ledger::test_budget_refuses_plans_and_charges_before_anything_is_written",),
    ),
    Fault(
        "budget-never-passed",
        "Charges pass max_epsilon.",
        "pl_privknn.privacy.ledger.budget",
        {
            "if epsilon <= budget:": "if epsilon <= 2 * budget:",
        },
        ("test_ledger::test_plans_before_the_first_charge_are_composed_and_later_ones_filtered",),
    ),
    Fault(
        "late-choices-not-noticed",
        "Parameters chosen in view of answers count as if they had been fixed before.",
        "pl_privknn.privacy.ledger.balance",
        {
            "if self.num_charges:\n            run.late.append(position)": "if self.num_charges < 0:\n            run.late.append(position)",
        },
        ("test_ledger::test_parameters_chosen_after_a_release_make_the_figure_conditional",),
    ),
    Fault(
        "filter-not-used",
        "Fully adaptive choices are admitted by ordinary composition.",
        "pl_privknn.privacy.ledger.budget",
        {
            "late = balance.num_charges > 0": "late = False",
        },
        ("test_ledger::test_plans_before_the_first_charge_are_composed_and_later_ones_filtered",),
    ),
    Fault(
        "late-budgets-trusted",
        "A budget raised in view of answers is called the one that holds.",
        "pl_privknn.privacy.ledger.budget",
        {
            "    if balance.late_budgets:": "    if False:",
        },
        ("test_ledger::test_parameters_chosen_after_a_release_make_the_figure_conditional",),
    ),
    Fault(
        "budget-taken-back",
        "A budget below what was granted is accepted, and reported as kept.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "if max_epsilon is not None and granted > max_epsilon:": "if False:",
        },
        ("test_ledger::test_budget_changes_are_rows_and_can_not_undo_a_grant",),
    ),
    Fault(
        "another-plan-accepted",
        "A run goes on with another plan than the one that was stated.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "if run.planned and not (extend and beyond(wanted, run.planned)):": "if False:",
        },
        ("test_ledger::test_same_plan_continues_and_another_is_refused",),
    ),
    Fault(
        "hash-not-checked",
        "Rows of a ledger can be changed.",
        "pl_privknn.privacy.ledger.store",
        {
            "if sealed != stored:": "if False:",
        },
        ("test_ledger_store::test_every_change_is_found_and_nothing_is_repaired[hash]",),
    ),
    Fault(
        "hash-of-the-row-alone",
        "Rows of a ledger can be taken out and reordered.",
        "pl_privknn.privacy.ledger.store",
        {
            'f"{previous}\\n{body}".encode()': 'f"{body}".encode()',
        },
        ("test_ledger_store::test_every_change_is_found_and_nothing_is_repaired[swapped]",),
    ),
    Fault(
        "head-not-checked",
        "The last rows of a ledger can be cut off.",
        "pl_privknn.privacy.ledger.store",
        {
            "if head != (position, sealed):": "if False:",
        },
        ("test_ledger_store::test_every_change_is_found_and_nothing_is_repaired[cut tail and head]",),
    ),
    Fault(
        "replaced-file-not-noticed",
        "A ledger that was exchanged under an open run is written to.",
        "pl_privknn.privacy.ledger.store",
        {
            "if _identity(self.path) != self._file:": "if False:",
        },
        ("test_ledger_store::test_file_that_is_moved_or_put_back_while_open",),
    ),
    Fault(
        "rows-not-synced",
        "A power failure takes rows back whose noise was drawn.",
        "pl_privknn.privacy.ledger.store",
        {
            '"PRAGMA query_only=ON" if self.readonly else "PRAGMA synchronous=EXTRA"': '"PRAGMA query_only=ON" if self.readonly else "PRAGMA synchronous=OFF"',
        },
        ("test_synced::test_ledgers_and_label_stores_sync_every_commit",),
    ),
    Fault(
        "row-after-the-return",
        "A charge is written when the next one comes: a kill in between forgets it.",
        "pl_privknn.privacy.ledger.run",
        {
            (
                '            return ledger._append("charge", {"run": self.run_id, "charge": '
                "charge.to_record(), **stated})"
            ): (
                '            content = {"run": self.run_id, "charge": charge.to_record(), **stated}\n'
                '            before, self._before = getattr(self, "_before", None), content\n'
                '            return ledger._append("charge", before) if before else '
                "ledger._balance.position + 1"
            ),
        },
        ("test_ledger::test_a_charge_is_on_disk_when_it_returns",),
    ),
    Fault(
        "other-processes-not-seen",
        "Several processes each see room in the budget and pass it together.",
        "pl_privknn.privacy.ledger.ledger",
        {
            "        with self._store.writing():\n            self._sync()\n            yield": "        with self._store.writing():\n            yield",
        },
        ("test_ledger_processes::test_processes_together_do_not_pass_the_budget",),
    ),
)
