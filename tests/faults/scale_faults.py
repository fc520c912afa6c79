"""Faults in runs of several processes, and with tables larger than memory."""

from __future__ import annotations

from .fault import Fault

_SUMS = "pl_privknn.labelers.statistics.shards"
_SGD = "pl_privknn.labelers.noisy_sgd"

FAULTS = (
    Fault(
        "labelling-in-the-training's-group",
        "A round longer than the training's patience ends the run, with its budget spent.",
        "pl_privknn.callbacks.process_group",
        {
            '[dist.new_group(backend="gloo", timeout=limit) for limit in (_SILENCE, _NO_LIMIT)]': "[dist.group.WORLD] * 2",
            "            self._ended.wait(_BEAT)\n": "            self._ended.wait(60)\n",
        },
        ("test_process_group::test_a_round_outlasts_the_timeout_of_the_training",),
    ),
    Fault(
        "asks-on-after-a-death",
        "Budget is spent on answers that nobody is left to train on.",
        "pl_privknn.callbacks.labeling_round",
        {"            self.check()\n": ""},
        ("test_two_processes::test_nothing_more_is_asked_once_a_process_has_died",),
    ),
    Fault(
        "table-left-in-a-file",
        "The features of all private records stay on the disk, under a name.",
        "pl_privknn.callbacks.table_memory",
        {"            path.unlink()\n": "            pass\n", "            os.rmdir(private)\n": ""},
        ("test_table_memory::test_answers_are_the_same_and_nothing_is_left",),
    ),
    Fault(
        "table-that-others-may-read",
        "Whoever has an account on the machine can open the table of private features.",
        "pl_privknn.callbacks.table_memory",
        {'tempfile.mkdtemp(prefix="privknn-", dir=place)': 'str(place / "t"); os.mkdir(private, 0o755)'},
        (
            "test_table_memory::test_a_large_table_lies_in_a_file_that_only_its_owner_could_read_and_that_has_no_name",
        ),
    ),
    Fault(
        "shards-doubled",
        "Every process searches all records, so that each of them votes several times.",
        "pl_privknn.callbacks.labeling_round",
        {"else rows[shard.first :: shard.stride]": "else rows"},
        ("test_sharded_runs::test_two_processes_answer_as_one[reverse_knn]",),
    ),
    Fault(
        "shards-share-coins",
        "The same coins are tossed for records of different shards, so that a sample is no Poisson sample.",
        "pl_privknn.labelers.private_knn",
        {'.stream("shard", self.shard.exchange.rank, release)': '.stream("shard", 0, release)'},
        ("test_sharded_runs::test_seeded_coins_of_shards_differ",),
    ),
    Fault(
        "k-of-each-shard-vote",
        "The k nearest of every shard vote, and not those of all together: a record moves more than two counts.",
        "pl_privknn.neighbors.shards",
        {
            "(squared <= farthest) & (squared < torch.inf)": "squared < torch.inf",
            "(chosen.sum(dim=1) > k)": "(chosen.sum(dim=1) < 0)",
        },
        ("test_shards::test_votes_of_all_records_are_those_of_one_process",),
    ),
    Fault(
        "ties-across-shards-by-shard",
        "Of equally near records those of the first shard vote: a record that moves to another one changes votes.",
        "pl_privknn.neighbors.shards",
        {
            "np.lexsort((packed[query].numpy(), squared[query].numpy()))": 'np.argsort(squared[query].numpy(), kind="stable")',
        },
        ("test_shards::test_votes_of_all_records_are_those_of_one_process",),
    ),
    Fault(
        "shards-toss-the-same-coins-in-later-rounds",
        "Seeded coins of a shard fall again in a later round or a resumed run.",
        "pl_privknn.labelers.private_knn",
        {"            self._neighbors.release = row\n": "            pass\n"},
        ("test_checks_in_shards::test_teachers_in_shards_keep_their_promises[knn sampled]",),
    ),
    Fault(
        "other-features-in-a-shard",
        "A process whose extractor learned something else goes on, and its records are searched in another space.",
        "pl_privknn.callbacks.labeling_round",
        {"if own.shape != self.example.shape or bool(": "if own.shape != self.example.shape and bool("},
        ("test_sharded_runs::test_a_process_that_makes_other_features_of_a_public_example_is_refused",),
    ),
    Fault(
        "sums-by-other-public-fits",
        "The records of a shard enter a sum by what that process learned of public examples.",
        _SUMS,
        {"        self.take_basis(basis)\n": ""},
        (
            "test_teachers_in_shards::test_records_of_all_shards_enter_by_what_the_first_one_learned_from_public_examples",
        ),
    ),
    Fault(
        "first-shard-counted-twice",
        "A record of the first process moves a sum by twice what is charged.",
        _SUMS,
        {
            "return self.shard.exchange.sum(self.private_sum(release, weights))": (
                "own = self.private_sum(release, weights); return own + self.shard.exchange.sum(own)"
            )
        },
        (
            "test_teachers_in_shards::test_released_statistics_are_those_of_one_process",
            "test_checks_in_shards::test_teachers_in_shards_keep_their_promises[class sums]",
        ),
    ),
    Fault(
        "noise-of-every-shard",
        "Each process draws noise for its own sum, and nobody pays for it first.",
        _SUMS,
        {
            "        self.take_basis(basis)\n        self.shard.exchange.sum(self.private_sum(release, weights))": (
                "        self.take_basis(basis)\n        own = self.private_sum(release, weights)\n"
                "        self.shard.exchange.sum(own + self.noise_source.stream('own').integers(own.shape, 2**24))"
            )
        },
        (
            "test_teachers_in_shards::test_released_statistics_are_those_of_one_process",
            "test_checks_in_shards::test_teachers_in_shards_keep_their_promises[class sums]",
        ),
    ),
    Fault(
        "a-sum-is-paid-for-before-it-has-come",
        "A process that dies costs a release, which a resumed run can't draw again.",
        "pl_privknn.labelers.statistics.teacher",
        {
            "            exact = self.whole_sum(number, weights)\n": "",
            '1, "statistics")\n            self._charged += 1\n': (
                '1, "statistics")\n            self._charged += 1\n'
                "            exact = self.whole_sum(number, weights)\n"
            ),
        },
        (
            "test_teachers_in_shards::test_a_process_that_dies_costs_nothing_and_its_run_goes_on_with_the_next_release",
        ),
    ),
    Fault(
        "batches-share-coins",
        "The same coins are tossed for records of different shards, so that a batch is no Poisson sample.",
        _SGD,
        {'row, left, *(("rank", rank) if rank else ()))': "row, left)"},
        (
            "test_teachers_in_shards::test_every_shard_tosses_coins_of_its_own_at_the_stated_rate",
            "test_checks_in_shards::test_teachers_in_shards_keep_their_promises[noisy sgd]",
        ),
    ),
    Fault(
        "batches-at-a-rate-by-shard",
        "Records of a shard take part more often than is charged.",
        _SGD,
        {
            "poisson_sample(len(self._vectors), self.mechanism.sampling_rate, coins)": (
                "poisson_sample(len(self._vectors), min(1.0, (1 + (rank > 0)) * self.mechanism.sampling_rate), coins)"
            )
        },
        (
            "test_teachers_in_shards::test_every_shard_tosses_coins_of_its_own_at_the_stated_rate",
            "test_checks_in_shards::test_teachers_in_shards_keep_their_promises[noisy sgd]",
        ),
    ),
    Fault(
        "teachers-in-shards-of-rows",
        "Where a record is removed, the rows of all later ones move to other shards, and most teachers change.",
        "pl_privknn.callbacks.fit_state",
        {"if not data.private_in_shards and labeler.lasting_shards:": "if False:"},
        ("test_sharded_runs::test_teachers_whose_shards_must_last_want_a_file_for_each_process",),
    ),
    Fault(
        "teachers-in-shards-under-replacement",
        "A record that replaces one of another shard changes two teachers, and one is paid for.",
        "pl_privknn.labelers.pate.pate",
        {'        return ("add_remove",)\n': "        return self.adjacencies\n"},
        (
            "test_teachers_in_shards::test_in_shards_a_replaced_record_is_two_changed_teachers_which_is_not_charged_for",
        ),
    ),
    Fault(
        "dealing-by-class-in-shards",
        "Partitions whose condition speaks of one table are drawn in each shard.",
        "pl_privknn.labelers.pate.pate",
        {
            "return type(self.partitioner) is RandomPartition and self.groups is None": "return self.groups is None"
        },
        ("test_sharded_runs::test_teachers_of_one_process_refuse_shards",),
    ),
    Fault(
        "persons-split-over-shards",
        "A person's records lie in several shards, with a teacher each, and one is paid for.",
        "pl_privknn.labelers.pate.pate",
        {
            "return type(self.partitioner) is RandomPartition and self.groups is None": (
                "return type(self.partitioner) is RandomPartition"
            )
        },
        ("test_sharded_runs::test_teachers_of_one_process_refuse_shards",),
    ),
    Fault(
        "shards-of-different-orders",
        "Processes that shuffled the records each in its own way read some of them several times.",
        "pl_privknn.callbacks.fit_state",
        {"        data.private.check_same(group.agree)\n": ""},
        (
            "test_sharded_runs::test_processes_that_shuffled_the_private_records_each_in_its_own_way_are_refused",
        ),
    ),
    Fault(
        "shares-of-different-orders",
        "A private training draws from shares that overlap: a record takes part in several processes, and is paid for once.",
        "pl_privknn.training.session",
        {"            data.private.check_same(self._processes.agree)\n": "            pass\n"},
        (
            "test_processes::test_processes_that_shuffled_the_records_each_in_its_own_way_are_refused_before_a_charge",
        ),
    ),
    Fault(
        "groups-of-different-members",
        "Processes that read different members of groups train on, and a record is drawn at another group's rate.",
        "pl_privknn.training.session",
        {"self._processes.agree(self.groups.members.numpy().tobytes())": "True"},
        ("test_processes::test_processes_that_read_different_members_of_groups_are_refused_before_a_charge",),
    ),
    Fault(
        "table-of-the-caller-overwritten",
        "A teacher scales records in the place of their owner's: another teacher of the same table sees others.",
        "pl_privknn.labelers.ind_knn.labeler",
        {"overwrite=self.owns_table": "overwrite=True"},
        ("test_ind_knn_labeler::test_only_a_table_that_nobody_else_looks_at_is_overwritten",),
    ),
    Fault(
        "table-owned-beyond-its-fit",
        "After a run that failed, a teacher overwrites the next table, which is its owner's.",
        "pl_privknn.callbacks.labeling_round",
        {"            self.labeler.owns_table = False\n": "            pass\n"},
        ("test_table_memory::test_a_teacher_owns_its_table_in_the_fit_alone",),
    ),
    Fault(
        "candidates-without-a-margin",
        "Whether a record takes part hangs on how a device rounds, and with it on the records around it.",
        "pl_privknn.neighbors.products",
        {"slack = 2 * (table.shape[1] + 16) * _UNIT_ROUNDOFF": "slack = 1e-6"},
        ("test_devices::test_candidates_reach_as_far_as_products_may_err",),
    ),
    Fault(
        "candidates-by-coarse-products",
        "Products are made in the precision of the training, and neighbours are missed by where they lie.",
        "pl_privknn.neighbors.products",
        {"        with _full_precision(device):\n": "        if True:\n"},
        ("test_devices::test_candidates_reach_as_far_as_products_may_err",),
    ),
)
