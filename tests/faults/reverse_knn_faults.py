"""Faults in reverse kNN: with a curator, without one, with a shuffler."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "one-vote-more",
        "A record votes for k + 1 queries and is charged k.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "nearest = assign(features, queries, self.k, ": "nearest = assign(features, queries, min(self.k + 1, len(queries)), ",
        },
        ("test_reverse_knn::test_counts_equal_a_literal_loop",),
    ),
    Fault(
        "replaced-record-charged-once",
        "A replaced record takes k votes and gives k, and is charged k.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            'moved = self.k * (2 if self.adjacency == "replace_one" else 1)': "moved = self.k",
        },
        ("test_reverse_knn::test_sensitivity_by_brute_force_equals_what_is_charged",),
    ),
    Fault(
        "noise-for-one-vote",
        "The noise of a stated ε ignores k.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            'noise = Laplace(scale=moved / check_positive("epsilon", epsilon))': 'noise = Laplace(scale=1 / check_positive("epsilon", epsilon))',
        },
        ("test_reverse_knn::test_sensitivity_by_brute_force_equals_what_is_charged[1-replace_one-2]",),
    ),
    Fault(
        "half-noise-reverse-knn",
        "Counts carry half the noise that was charged.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "self.noise.add_noise(counts, noise).double()": "self.noise.add_noise(2 * counts, noise).double() / 2",
        },
        (
            (
                "test_reverse_knn::test_counts_carry_the_charged_noise_and_everything_follows_from_them[1-ad"
                "d_remove-5.0]"
            ),
        ),
    ),
    Fault(
        "exact-counts-decide",
        "Labels, probabilities and scores are those of the exact counts.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "return decide(noisy, self.noise.deviation": "return decide(counts.double(), self.noise.deviation",
        },
        (
            (
                "test_reverse_knn::test_counts_carry_the_charged_noise_and_everything_follows_from_them[1-ad"
                "d_remove-5.0]"
            ),
        ),
    ),
    Fault(
        "abstains-on-exact-counts",
        "Which queries are refused is told by the exact counts.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "return decide(noisy, self.noise.deviation, self.abstain, self.soft, max_answers)": "made = decide(noisy, self.noise.deviation, 0.0, self.soft, max_answers)\n        made.labels[counts.sum(dim=1) == 0] = -1\n        return made",
        },
        (
            (
                "test_reverse_knn::test_counts_carry_the_charged_noise_and_everything_follows_from_them[1-ad"
                "d_remove-5.0]"
            ),
        ),
    ),
    Fault(
        "one-round-planned-for-two",
        "The promise covers one round of reverse kNN, however many there are.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "return [Charge(self.noise, rounds)]": "return [Charge(self.noise, 1)]",
        },
        ("test_reverse_knn::test_cost_does_not_depend_on_the_number_of_queries",),
    ),
    Fault(
        "one-round-planned-for-two-local",
        "As much for messages.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "num_classes).mechanism, rounds)]": "num_classes).mechanism, 1)]",
        },
        ("test_charges::test_rounds_stay_within_their_plan[reverse_knn_local]",),
    ),
    Fault(
        "prices-from-private-features",
        "Prices learned from the private records: one record moves the edges of all.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "learn_prices(self._public, queries, self.k)": "learn_prices(next(iter(self._blocks()))[0], queries, self.k)",
        },
        ("test_spreading_rounds::test_balanced_teacher_gets_the_public_features_of_each_round",),
    ),
    Fault(
        "reverse-queries-centred-by-private-mean",
        "Where records vote depends on the mean of all records.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            "nearest = assign(features, queries, self.k, ": "nearest = assign(features - features.mean(dim=0), queries, self.k, ",
        },
        ("test_reverse_knn::test_counts_equal_a_literal_loop",),
    ),
    Fault(
        "local-noise-for-one-bit",
        "Two answers differ in 2k bits; the noise is for k.",
        "pl_privknn.labelers.reverse_knn.local",
        {
            "RandomizedResponse.for_epsilon(self.epsilon, 2, 2 * self.table.ones)": "RandomizedResponse.for_epsilon(self.epsilon, 2, self.table.ones)",
        },
        ("test_reverse_knn_local::test_randomised_response_is_private_for_the_whole_message",),
    ),
    Fault(
        "simulation-flips-too-little",
        "The messages that stand for all clients' are flipped less than they say.",
        "pl_privknn.labelers.reverse_knn.local",
        {
            "kept = binomial(true, 1 - flip, noise)": "kept = binomial(true, 1 - flip / 2, noise)",
        },
        ("test_reverse_knn_local::test_messages_and_simulation_have_the_same_distribution",),
    ),
    Fault(
        "collision-gain",
        "A Collision message has twice its ε.",
        "pl_privknn.labelers.reverse_knn.collision",
        {
            'self.gain = math.exp(check_positive("epsilon", epsilon))': 'self.gain = math.exp(2 * check_positive("epsilon", epsilon))',
        },
        ("test_reverse_knn_local::test_every_pair_of_answers_under_every_hash_is_private",),
    ),
    Fault(
        "collision-total",
        "The probabilities of a Collision message are not normalised over all of its ones.",
        "pl_privknn.labelers.reverse_knn.collision",
        {
            "self.total = self.ones * self.gain + self.length - self.ones": "self.total = self.gain + self.length - 1",
        },
        ("test_reverse_knn_local::test_every_pair_of_answers_under_every_hash_is_private",),
    ),
    Fault(
        "collision-sends-a-mark-too-often",
        "A value that a one is hashed to is sent more often than ε allows.",
        "pl_privknn.labelers.reverse_knn.collision",
        {
            "sends_marked = uniform < hit * self.hit": "sends_marked = uniform < 1.5 * hit * self.hit",
        },
        ("test_reverse_knn_local::test_values_are_sent_with_their_probabilities",),
    ),
    Fault(
        "one-hash-for-all-clients",
        "All clients hash alike.",
        "pl_privknn.labelers.reverse_knn.collision",
        {
            "keys = noise.integers((len(ones),), _KEYS)": "keys = noise.integers((1,), _KEYS).expand(len(ones))",
        },
        ("test_reverse_knn_local::test_messages_and_simulation_have_the_same_distribution",),
    ),
    Fault(
        "separation-whole-epsilon-twice",
        "Queries and labels each get the whole ε.",
        "pl_privknn.labelers.reverse_knn.local",
        {
            "Bloom(epsilon / 2, table.k)": "Bloom(epsilon, table.k)",
        },
        ("test_reverse_knn_local::test_hashed_messages_are_private_as_a_whole[k1-separation]",),
    ),
    Fault(
        "concatenation-counts-queries-alone",
        "The labels beside the queries are left out of a message's budget.",
        "pl_privknn.labelers.reverse_knn.local",
        {
            "self.bloom = Bloom(epsilon, ones, min(": "self.bloom = Bloom(epsilon * ones / table.k, ones, min(",
        },
        ("test_reverse_knn_local::test_hashed_messages_are_private_as_a_whole[k1-concatenation]",),
    ),
    Fault(
        "amplified-by-more-clients",
        "Shuffling is accounted with twice as many clients as are sure to take part.",
        "pl_privknn.labelers.reverse_knn.shuffle",
        {
            "return ShuffleAmplification(self.randomizer.epsilon, self.num_clients)": "return ShuffleAmplification(self.randomizer.epsilon, 2 * self.num_clients)",
        },
        ("test_reverse_knn_shuffle::test_labelers_answer_and_pay_without_a_curator",),
    ),
    Fault(
        "fewer-clients-accepted",
        "A round with fewer clients than the guarantee counts on.",
        "pl_privknn.labelers.reverse_knn.channel",
        {
            'if self.trust == "shuffle" and found <': 'if self.trust == "shuffle" and 2 * found <',
        },
        ("test_reverse_knn_shuffle::test_fewer_clients_than_stated_are_refused_before_anything_is_paid",),
    ),
    Fault(
        "local-epsilon-overshoots",
        "The ε of single messages is larger than shuffling can hide.",
        "pl_privknn.labelers.reverse_knn.shuffle",
        {
            "if cost(middle) <= epsilon else (low, middle)\n    return low": "if cost(middle) <= 1.2 * epsilon else (low, middle)\n    return high",
        },
        ("test_reverse_knn_shuffle::test_calibration_keeps_the_target_and_wastes_little",),
    ),
    Fault(
        "delta-of-all-shares",
        "The shares' noise is found for another δ than the stated one.",
        "pl_privknn.labelers.reverse_knn.shuffle",
        {
            "    charge = Charge(mechanism, rounds)\n    return account([charge], delta=delta,": (
                "    charge = Charge(mechanism, rounds)\n"
                "    return account([charge], delta=min(0.5, 100 * delta),"
            ),
        },
        ("test_reverse_knn_shuffle::test_calibration_keeps_the_target_and_wastes_little",),
    ),
    Fault(
        "share-of-twice-the-clients",
        "Each client adds the share of a larger crowd.",
        "pl_privknn.labelers.reverse_knn.shuffle",
        {
            "self.mechanism.share(self.table.cells, self.num_clients, noise)": "self.mechanism.share(self.table.cells, 2 * self.num_clients, noise)",
        },
        (
            (
                "test_reverse_knn_shuffle::test_messages_are_shuffled_objects_with_the_distribution_of_the_s"
                "imulation"
            ),
        ),
    ),
    Fault(
        "messages-not-shuffled",
        "Messages arrive in the order of their senders.",
        "pl_privknn.labelers.reverse_knn.shuffle",
        {
            "return messages[noise.uniform((len(messages),)).argsort()]": "return messages",
        },
        (
            (
                "test_reverse_knn_shuffle::test_messages_are_shuffled_objects_with_the_distribution_of_the_s"
                "imulation"
            ),
        ),
    ),
    Fault(
        "half-noise-simulated-shares",
        "The simulated sum of all shares is drawn too small.",
        "pl_privknn.labelers.reverse_knn.shuffle",
        {
            "+ self.mechanism.draw(self.table.cells, noise)": "+ self.mechanism.draw(self.table.cells, noise) // 2",
        },
        (
            (
                "test_reverse_knn_shuffle::test_messages_are_shuffled_objects_with_the_distribution_of_the_s"
                "imulation"
            ),
        ),
    ),
    Fault(
        "curator-without-trust",
        "Under local trust the exact counts can be released by hand.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            (
                "        if self._channel is not None:\n"
                "            raise ValueError(\n"
                '                f"trust={self.trust!r}: nobody'
            ): (
                "        if False:\n"
                "            raise ValueError(\n"
                '                f"trust={self.trust!r}: nobody'
            ),
        },
        ("test_reverse_knn_shuffle::test_counts_are_released_by_a_curator_alone",),
    ),
    Fault(
        "local-under-added-records",
        "Messages, whose senders are visible, are charged for added records.",
        "pl_privknn.labelers.reverse_knn.reverse_knn",
        {
            'natural: Adjacency = "add_remove" if trust == "central" else "replace_one"': 'natural: Adjacency = "add_remove"',
            'or secure or self.adjacency != "replace_one":': "or secure:",
        },
        ("test_reverse_knn_shuffle::test_bad_arguments_are_named",),
    ),
)
