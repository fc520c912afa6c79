"""Faults in what is drawn: noise, coins, generators, and their payment."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "half-noise-gaussian",
        "Everything released with Gaussian noise costs twice the stated Gaussian-DP parameter.",
        "pl_privknn.privacy.mechanisms.gaussian",
        {
            "noise.normal(tuple(values.shape), self.sigma)": "noise.normal(tuple(values.shape), self.sigma / 2)",
        },
        ("test_mechanism_plds::test_drawn_noise_has_the_accounted_scale_and_leaves_the_values_alone",),
    ),
    Fault(
        "shared-noise-gaussian",
        "All queries of a batch get the same noise: the difference of two answers is exact.",
        "pl_privknn.privacy.mechanisms.gaussian",
        {
            "noise.normal(tuple(values.shape), self.sigma)": "noise.normal(tuple(values.shape[-1:]), self.sigma)",
        },
        ("test_private_knn::test_same_distribution_as_the_literal_algorithm",),
    ),
    Fault(
        "no-noise-gaussian-large-batch",
        "Only the first of many answers is noised.",
        "pl_privknn.privacy.mechanisms.gaussian",
        {
            "noise.normal(tuple(values.shape), self.sigma).to(values.device)": (
                "noise.normal(tuple(values.shape), self.sigma).to(values.device) * "
                "(values.new_ones(len(values), dtype=values.double().dtype).cumsum(0) < 2).view(-1, "
                "*[1] * (values.ndim - 1))"
            ),
        },
        ("test_mechanism_plds::test_drawn_noise_has_the_accounted_scale_and_leaves_the_values_alone",),
    ),
    Fault(
        "half-noise-laplace",
        "Everything released with Laplace noise costs twice its ε.",
        "pl_privknn.privacy.mechanisms.laplace",
        {
            "noise.laplace(tuple(values.shape), self.scale)": "noise.laplace(tuple(values.shape), self.scale / 2)",
        },
        ("test_mechanism_plds::test_drawn_noise_has_the_accounted_scale_and_leaves_the_values_alone",),
    ),
    Fault(
        "inverse-scale-laplace",
        "1/b is taken for b, as in published code: a scale of 10 draws noise of scale 0.1.",
        "pl_privknn.privacy.mechanisms.laplace",
        {
            "noise.laplace(tuple(values.shape), self.scale)": "noise.laplace(tuple(values.shape), 1 / self.scale)",
        },
        ("test_mechanism_plds::test_drawn_noise_has_the_accounted_scale_and_leaves_the_values_alone",),
    ),
    Fault(
        "half-noise-discrete-gaussian",
        "Exact noise of half the accounted width.",
        "pl_privknn.privacy.mechanisms.discrete_gaussian",
        {
            "noise.discrete_gaussian(tuple(values.shape), self.sigma)": "noise.discrete_gaussian(tuple(values.shape), self.sigma / 2)",
        },
        ("test_local_mechanisms::test_discrete_noise_is_whole_and_leaves_the_values_alone[mechanism0]",),
    ),
    Fault(
        "half-noise-discrete-laplace",
        "Exact noise of half the accounted width.",
        "pl_privknn.privacy.mechanisms.discrete_laplace",
        {
            "noise.discrete_laplace(tuple(values.shape), self.scale)": "noise.discrete_laplace(tuple(values.shape), self.scale / 2)",
        },
        ("test_local_mechanisms::test_discrete_noise_is_whole_and_leaves_the_values_alone[mechanism1]",),
    ),
    Fault(
        "half-noise-argmax",
        "An arg-max by the exponential mechanism with half the noise.",
        "pl_privknn.privacy.mechanisms.argmax",
        {
            "noise.gumbel(tuple(votes.shape), self.scale)": "noise.gumbel(tuple(votes.shape), self.scale / 2)",
        },
        ("test_mechanism_plds::test_argmax_draws_the_softmax",),
    ),
    Fault(
        "shared-noise-argmax",
        "All queries of a batch get the same Gumbel noise.",
        "pl_privknn.privacy.mechanisms.argmax",
        {
            "noise.gumbel(tuple(votes.shape), self.scale)": "noise.gumbel(tuple(votes.shape[-1:]), self.scale)",
        },
        ("test_mechanism_plds::test_argmax_draws_the_softmax",),
    ),
    Fault(
        "half-noise-exact-argmax",
        "An exact choice with half the noise.",
        "pl_privknn.privacy.mechanisms.argmax",
        {
            "noise.exponential_choice(votes, self.scale)": "noise.exponential_choice(votes, self.scale / 2)",
        },
        ("test_secure_noise::test_exact_choices_have_the_softmax_distribution",),
    ),
    Fault(
        "nan-wins-argmax",
        "A vote that is not a number wins every arg-max and gives its record's class away.",
        "pl_privknn.privacy.mechanisms.argmax",
        {
            "if not bool(votes.isfinite().all()):": "if False:",
        },
        ("test_further_mechanisms::test_not_a_number_never_wins_an_argmax",),
    ),
    Fault(
        "half-noise-screening",
        "Screening passes or fails with half the noise.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "noise.normal(tuple(max_votes.shape), self.sigma)": "noise.normal(tuple(max_votes.shape), self.sigma / 2)",
        },
        ("test_mechanism_plds::test_screening_passes_with_the_accounted_probability",),
    ),
    Fault(
        "half-noise-exact-screening",
        "Exact screening passes or fails with half the noise.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "noise.discrete_gaussian(tuple(max_votes.shape), self.sigma)": "noise.discrete_gaussian(tuple(max_votes.shape), self.sigma / 2)",
        },
        ("test_secure_noise::test_secure_screening_draws_what_it_accounts",),
    ),
    Fault(
        "shared-noise-screening",
        "One draw decides whether all queries of a batch pass.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "noise.normal(tuple(max_votes.shape), self.sigma)": "noise.normal((1,), self.sigma)",
        },
        ("test_mechanism_plds::test_screening_passes_with_the_accounted_probability",),
    ),
    Fault(
        "screening-below-its-family",
        "Counts that the accounting left out pass or fail as they are.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "max_votes = max_votes.clamp_min(self.lowest)": "max_votes = max_votes.clamp_min(0)",
        },
        ("test_screening_tables::test_counts_of_all_neighbouring_tables_lie_in_the_family",),
    ),
    Fault(
        "screening-of-k-records",
        "Screening a table of exactly k records, where one record less leaves the accounted family.",
        "pl_privknn.privacy.mechanisms.screening",
        {
            "num_records <= self.k": "num_records < self.k",
        },
        ("test_screening_tables::test_private_knn_wants_more_than_k_records_for_screening_without_sampling",),
    ),
    Fault(
        "half-flips-randomized-response",
        "Clients' messages are flipped half as often as accounted.",
        "pl_privknn.privacy.mechanisms.randomized_response",
        {
            "noise.bernoulli(tuple(values.shape), self.flip_probability)": "noise.bernoulli(tuple(values.shape), self.flip_probability / 2)",
        },
        ("test_local_mechanisms::test_randomized_values_have_the_accounted_frequencies[2]",),
    ),
    Fault(
        "half-noise-negative-binomial",
        "The shuffled counts carry half the noise.",
        "pl_privknn.privacy.mechanisms.negative_binomial",
        {
            "return _draw(self.shape, self.ratio, cells, noise)": "return _draw(self.shape / 2, self.ratio, cells, noise)",
        },
        ("test_reverse_knn_shuffle::test_shares_of_all_clients_add_up_to_the_noise",),
    ),
    Fault(
        "half-share-negative-binomial",
        "Every client adds half of its share of the noise.",
        "pl_privknn.privacy.mechanisms.negative_binomial",
        {
            'self.shape / check_int("clients", clients)': 'self.shape / (2 * check_int("clients", clients))',
        },
        ("test_reverse_knn_shuffle::test_shares_of_all_clients_add_up_to_the_noise",),
    ),
    Fault(
        "narrow-normal-at-the-door",
        "Every normal draw of the package is too small.",
        "pl_privknn.privacy.noise",
        {
            "torch.special.ndtri(tail).mul_(-scale)": "torch.special.ndtri(tail).mul_(-scale * 0.8)",
        },
        ("test_noise::test_tails_are_those_of_the_law[40]",),
    ),
    Fault(
        "one-sided-noise-at-the-door",
        "All continuous noise has the same sign.",
        "pl_privknn.privacy.noise",
        {
            "sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)": "sign = np.ones(count)",
        },
        ("test_noise::test_tails_are_those_of_the_law[100]",),
    ),
    Fault(
        "cut-tails-at-the-door",
        "Noise ends at some eight deviations: what lies beyond is certain.",
        "pl_privknn.privacy.noise",
        {
            "short = np.flatnonzero(words < np.uint64(1 << 53))": "tail = np.maximum(tail, 2.0**10); short = np.arange(0)",
        },
        ("test_noise::test_tails_are_those_of_the_law[100]",),
    ),
    Fault(
        "coins-at-a-higher-rate",
        "Each record takes part a little more often than accounted.",
        "pl_privknn.privacy.samplers",
        {
            "result: NDArray[np.bool_] = draws < digit": "result: NDArray[np.bool_] = draws <= digit",
        },
        ("test_noise_discrete::test_coins_of_whole_bytes_by_enumeration[255]",),
    ),
    Fault(
        "modulo-bias",
        "Whole numbers, partitions among them, are not uniform.",
        "pl_privknn.privacy.samplers",
        {
            "accepted = draws <= below - 1": "draws = draws % below; accepted = draws >= 0",
        },
        ("test_noise_discrete::test_integers_are_uniform[3]",),
    ),
    Fault(
        "discrete-gaussian-accepts-too-much",
        "The exact Gaussian sampler draws another distribution.",
        "pl_privknn.privacy.samplers",
        {
            "2 * p * q * t * t": "3 * p * q * t * t",
        },
        ("test_noise_discrete::test_discrete_gaussian_proposals_cancel_exactly[1]",),
    ),
    Fault(
        "discrete-laplace-counts-zero-twice",
        "The exact Laplace sampler draws zero too often.",
        "pl_privknn.privacy.samplers",
        {
            "accepted = ~(negative & (magnitude == 0))": "accepted = np.ones(len(low), bool)",
        },
        ("test_noise_discrete::test_discrete_laplace_has_its_mass_function[0.2]",),
    ),
    Fault(
        "seeded-default-noise",
        "Whoever reads the source can subtract the noise of every run.",
        "pl_privknn.privacy.noise",
        {
            "return SystemNoise()": "return SeededNoise(0)",
        },
        ("test_noise::test_default_is_the_cryptographic_source",),
    ),
    Fault(
        "system-noise-from-numpy",
        "The noise of real runs comes from a generator whose state its outputs tell.",
        "pl_privknn.privacy.noise",
        {
            "np.frombuffer(bytearray(os.urandom(8 * count)), np.uint64)": "np.frombuffer(bytearray(np.random.bytes(8 * count)), np.uint64)",
        },
        ("test_noise::test_system_noise_differs_after_fork_and_between_processes",),
    ),
    Fault(
        "seeded-noise-called-cryptographic",
        "A benchmark's seed stands in its configuration, and the report says unconditional.",
        "pl_privknn.privacy.noise",
        {
            "    cryptographic: ClassVar[bool] = False": "    cryptographic: ClassVar[bool] = True",
        },
        ("test_noise::test_default_is_the_cryptographic_source",),
    ),
    Fault(
        "streams-repeat",
        "A resumed run draws the noise of earlier rows again: answers can be subtracted.",
        "pl_privknn.privacy.noise",
        {
            "_digest(self.seed, *key)[:8]": "_digest(self.seed, key[0])[:8]",
        },
        ("test_noise::test_stream_depends_on_seed_and_key_alone",),
    ),
    Fault(
        "noise-without-payment",
        "Noise is handed out though the ledger was not charged.",
        "pl_privknn.privacy.ledger.run",
        {
            (
                "return source.stream(key, ledger.charge(mechanism, count, noise=source, "
                "adjacencies=adjacencies))"
            ): "return source.stream(key, count)",
        },
        ("test_reverse_knn::test_sensitivity_by_brute_force_equals_what_is_charged[1-add_remove-1]",),
    ),
    Fault(
        "noise-before-payment",
        "Noise, and with it an answer, may exist when the charge is refused.",
        "pl_privknn.privacy.ledger.run",
        {
            (
                "return source.stream(key, ledger.charge(mechanism, count, noise=source, "
                "adjacencies=adjacencies))"
            ): (
                "drawn = source.stream(key, count)\n"
                "    drawn.normal((1,), 1.0)\n"
                "    ledger.charge(mechanism, count, noise=source, adjacencies=adjacencies)\n"
                "    return drawn"
            ),
        },
        ("test_private_knn::test_nothing_is_drawn_when_a_charge_is_refused[0]",),
    ),
    Fault(
        "one-charge-for-many",
        "A batch of answers is paid for as one.",
        "pl_privknn.privacy.ledger.run",
        {
            "ledger.charge(mechanism, count, noise": "ledger.charge(mechanism, 1, noise",
        },
        ("test_private_knn::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "charge-hides-its-noise",
        "Charges say nothing of their noise.",
        "pl_privknn.privacy.ledger.run",
        {
            "noise=source, adjacencies=adjacencies)": "adjacencies=adjacencies)",
        },
        ("test_guarantee::test_no_chain_of_doors_raises_a_guarantee_or_lowers_epsilon",),
    ),
)
