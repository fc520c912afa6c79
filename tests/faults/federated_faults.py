"""Faults in rounds over clients: what a node answers, what it pays, what the shuffler hands on."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "round-answered-again",
        "Whoever sends a request twice has two messages of each record for the price of one.",
        "pl_privknn.federated.answered",
        {
            "if name in known:": "if False:",
        },
        ("test_client::test_a_round_is_answered_once_and_no_message_can_be_had_twice",),
    ),
    Fault(
        "budget-of-the-last-round",
        "A node compares each round by itself with its budget.",
        "pl_privknn.federated.answered",
        {
            "math.fsum([*known.values(), epsilon])": "math.fsum([epsilon])",
        },
        ("test_client::test_rounds_add_up_to_the_budget_and_no_further",),
    ),
    Fault(
        "record-lost-is-a-record-empty",
        "A node whose file is damaged forgets what it spent.",
        "pl_privknn.federated.answered",
        {
            "            sound = False": "            known, sound = {}, True",
        },
        ("test_client::test_a_record_that_is_none_is_never_taken_for_an_empty_one",),
    ),
    Fault(
        "records-without-a-lock",
        "Two processes of a node read one total and both spend what is left.",
        "pl_privknn.federated.answered",
        {
            'with FileLock(f"{self.path}.lock"):': 'with FileLock(f"{self.path}.{id(self)}.lock"):',
        },
        ("test_client::test_other_processes_wait_from_the_reading_of_a_total_to_its_writing",),
    ),
    Fault(
        "node-draws-before-it-pays",
        "A crash between the two forgets an answer that was sent.",
        "pl_privknn.federated.client",
        {
            "        self.answered.spend(request.round, request.epsilon, self.max_epsilon)\n": "",
            "        return sent if": "        self.answered.spend(request.round, request.epsilon, self.max_epsilon)\n        return sent if",
        },
        ("test_client::test_what_is_spent_is_on_disk_before_a_coin_is_tossed",),
    ),
    Fault(
        "node-pays-for-half-its-noise",
        "Messages carry the noise of twice the ε that was asked for and noted.",
        "pl_privknn.federated.client",
        {
            "make_randomizer(request.randomizer, request.epsilon, request.table)": "make_randomizer(request.randomizer, 2 * request.epsilon, request.table)",
        },
        (
            "test_client::test_what_leaves_is_the_randomisers_message_of_the_literal_nearest_query[randomized_response]",
        ),
    ),
    Fault(
        "server-chooses-the-classes",
        "Whether a node refuses tells the server which labels it has.",
        "pl_privknn.federated.client",
        {
            '            "num_classes": (request.num_classes, self.num_classes),\n': "",
            "voter.fit(self._features, self._labels, self.num_classes)": "voter.fit(self._features, self._labels, request.num_classes)",
        },
        ("test_client::test_a_request_for_something_else_is_refused_before_anything_is_spent",),
    ),
    Fault(
        "server-chooses-the-trust",
        "A node that was to trust nobody sends what only a crowd hides.",
        "pl_privknn.federated.client",
        {
            '            "trust": (request.trust, self.trust),\n': "",
        },
        ("test_client::test_a_request_for_something_else_is_refused_before_anything_is_spent",),
    ),
    Fault(
        "seed-under-an-honest-ledger",
        "Coins of a seed, in a ledger that promises cryptographic ones.",
        "pl_privknn.federated.client",
        {
            "if not (self.noise_source.cryptographic or request.seeded):": "if False:",
        },
        ("test_client::test_a_seeded_node_answers_a_server_whose_ledger_says_so_alone",),
    ),
    Fault(
        "error-text-leaves-the-node",
        "An unforeseen error takes what is private to the server.",
        "pl_privknn.federated.replies",
        {
            "    except Exception:\n": "    except Exception as error:\n",
            '"an error on the node; its own log has it"': "str(error)",
        },
        ("test_client::test_nothing_of_an_unforeseen_error_leaves_the_node",),
    ),
    Fault(
        "clients-asked-before-the-ledger",
        "A server that crashes while it waits has answers that its ledger knows nothing of.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            '        self.paid(ledger, protocol.mechanism, 1, "messages")\n        messages = fetch()': '        messages = fetch()\n        self.paid(ledger, protocol.mechanism, 1, "messages")',
        },
        ("test_round::test_a_client_is_asked_after_the_round_is_paid_for",),
    ),
    Fault(
        "second-reply-counts",
        "A node that replies twice has two votes.",
        "pl_privknn.federated.server",
        {
            "if node in seen:": "if False:",
        },
        ("test_round::test_a_second_reply_and_one_of_a_stranger_are_left_out_by_name",),
    ),
    Fault(
        "mixed-in-order",
        "The shuffler hands on messages as they came: the server knows whose each is.",
        "pl_privknn.federated.shuffler",
        {
            "Shuffled.shuffle(messages, self.noise_source.stream(": "(lambda kept, _: kept)(messages, self.noise_source.stream(",
        },
        ("test_shuffled_round::test_messages_are_handed_on_in_an_order_of_the_system_generator",),
    ),
    Fault(
        "mixed-again",
        "Two mixtures that differ in one envelope give its message away.",
        "pl_privknn.federated.shuffler",
        {
            "        self.mixed.spend(request.round, 0.0, math.inf)\n": "",
        },
        ("test_shuffled_round::test_a_round_is_mixed_once",),
    ),
    Fault(
        "any-crowd-is-handed-on",
        "The shuffler mixes fewer messages than the amplification counts on.",
        "pl_privknn.federated.shuffler",
        {
            "if len(messages) < request.min_records:": "if False:",
        },
        ("test_shuffled_round::test_a_crowd_that_is_refused_may_still_grow",),
    ),
    Fault(
        "one-envelope-many-times",
        "A server fills the crowd with copies of one envelope.",
        "pl_privknn.federated.shuffler",
        {
            "in dict.fromkeys(envelopes):": "in envelopes:",
        },
        ("test_shuffled_round::test_envelopes_that_come_twice_count_once",),
    ),
    Fault(
        "envelopes-for-any-request",
        "The shuffler is told of a smaller crowd than the clients were.",
        "pl_privknn.federated.shuffler",
        {
            "open_sealed(envelope, self._key, request.digest)": "open_sealed(envelope, self._key, envelope[32:64])",
        },
        ("test_shuffled_round::test_envelopes_for_another_request_do_not_open",),
    ),
)
