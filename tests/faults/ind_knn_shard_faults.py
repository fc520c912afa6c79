"""Faults in Ind-KNN's budgets that lie in shards or belong to groups of records."""

from __future__ import annotations

from .fault import Fault

_SHARDS = "pl_privknn.labelers.ind_knn.shards"
_BUDGETS = "pl_privknn.labelers.ind_knn.labeler_budgets"
_TESTS = "test_ind_knn_shards::test_"

FAULTS = (
    Fault(
        "shards-spend-nothing",
        "What records of other shards spend is forgotten at the next query.",
        _SHARDS,
        {"        table.left[self._near] = self._left\n": ""},
        (
            f"{_TESTS}answers_and_payments_are_those_of_one_process[two-cosine]",
            "test_checks_in_shards::test_teachers_in_shards_keep_their_promises[ind knn]",
        ),
    ),
    Fault(
        "votes-of-shards-doubled",
        "A record of another shard votes twice, and pays once.",
        "pl_privknn.labelers.ind_knn.others",
        {
            "return self._exchange.sum(self._none).numpy()": "return 2 * self._exchange.sum(self._none).numpy()"
        },
        (
            f"{_TESTS}answers_and_payments_are_those_of_one_process[two-cosine]",
            "test_checks_in_shards::test_teachers_in_shards_keep_their_promises[ind knn]",
        ),
    ),
    Fault(
        "shards-keep-no-budgets",
        "What records of other shards have spent reaches no disk, and a resumed run gives it back.",
        _SHARDS,
        {"        self._engine.pay(self._before)\n": ""},
        (f"{_TESTS}every_shard_keeps_its_own_budgets_and_a_resumed_run_goes_on_with_them[digests]",),
    ),
    Fault(
        "answers-before-other-shards-paid",
        "Answers leave though another shard's budgets were not written.",
        "pl_privknn.labelers.ind_knn.prediction",
        {"            self.others.pay(self.budgets.mark)\n": ""},
        (
            f"{_TESTS}a_process_that_dies_after_the_budgets_were_written_lets_nothing_out_and_gives_nothing_back",
        ),
    ),
    Fault(
        "other-number-of-shards",
        "A run goes on in another number of shards, and records come to budgets that are not theirs.",
        _BUDGETS,
        {
            'if (stored := tuple(self.content.get("shard", _WHOLE))) != shard:': "if (stored := shard) != shard:"
        },
        (f"{_TESTS}other_numbers_of_shards_and_budgets_that_are_not_there_are_refused_by_name",),
    ),
    Fault(
        "lost-budgets-of-a-shard-start-afresh",
        "A shard whose budgets are gone goes on with full ones.",
        _SHARDS,
        {
            "if self.names is not None and not (": "if False and not (",
            'if state.content["leader"] != self.stream or ': "if False and ",
        },
        (f"{_TESTS}other_numbers_of_shards_and_budgets_that_are_not_there_are_refused_by_name",),
    ),
    Fault(
        "older-budgets-of-a-shard-go-on",
        "A shard's budgets that were put back from a copy are spent again.",
        _SHARDS,
        {"if self.marks is not None and not state.budgets.has_mark(self.marks[rank]):": "if False:"},
        (f"{_TESTS}an_older_copy_of_one_shards_budgets_is_refused[1]",),
    ),
    Fault(
        "records-leave-shards",
        "Records of a shard may be missing for a while, so that equal ones of other shards spend their budgets too.",
        _BUDGETS,
        {"if self.shard != _WHOLE and self.begun and not is_same:": "if False:"},
        (f"{_TESTS}records_neither_come_nor_go_once_something_was_answered[digests]",),
    ),
    Fault(
        "records-swap-numbers-between-shards",
        "Two records of different shards exchange their numbers, and each spends the other's budget.",
        _BUDGETS,
        {"if begun and self.shard != _WHOLE and now != self._known:": "if False:"},
        (f"{_TESTS}records_that_changed_places_under_their_numbers_are_refused",),
    ),
    Fault(
        "numbers-of-other-rows",
        "Records of a shard come under the numbers of the first rows, whoever those are.",
        "pl_privknn.callbacks.labeling_round",
        {"None if given is None else given[rows]": "None if given is None else given[: len(rows)]"},
        ("test_sharded_runs::test_numbers_of_records_come_with_the_records_of_the_shard",),
    ),
    Fault(
        "begun-in-one-shard-alone",
        "A shard that wrote nothing before its process died takes records that have spent in another one.",
        _BUDGETS,
        {"return self.budgets.begun or self.begun_elsewhere": "return self.budgets.begun"},
        (f"{_TESTS}what_one_shard_has_spent_holds_all_of_them_to_their_records",),
    ),
    Fault(
        "a-second-budget-after-a-resume",
        "What a record has spent of its group's budget is not held against it when the run goes on.",
        "pl_privknn.labelers.ind_knn.prediction",
        {
            "self.parameters.quanta(limits) - (whole - left)": "self.parameters.quanta(limits)",
        },
        ("test_ind_knn_groups::test_a_resumed_stream_goes_on_with_what_each_record_has_left",),
    ),
    Fault(
        "ind-knn-members-of-other-rows",
        "A resumed stream takes the members of a reordered table, and a record spends another group's budget.",
        "pl_privknn.labelers.ind_knn.labeler_budgets",
        {
            " or not self._are_held(now)": "",
        },
        ("test_ind_knn_groups::test_every_record_keeps_its_group_once_something_was_answered[False]",),
    ),
)
