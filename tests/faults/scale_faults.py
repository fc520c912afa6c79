"""Faults in runs of several processes, and with tables larger than memory."""

from __future__ import annotations

from .fault import Fault

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
            "chosen = packed.gather(1, order)[:, : self._nearest.k]": "chosen = packed.gather(1, order)",
            "(squared[:, : self._nearest.k] < torch.inf)": "(squared < torch.inf)",
        },
        ("test_shards::test_votes_of_all_records_are_those_of_one_process",),
    ),
)
