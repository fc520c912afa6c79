"""Faults in Private-kNN: samples, votes, answers."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "cells-of-private-features",
        "The cells are made of the private records, so that one of them moves the borders of all.",
        "pl_privknn.labelers.private_knn",
        {
            "            features, self._centroids, self": "            features, self.cells.centroids(features), self",
        },
        ("test_check_labeler::test_labelers_keep_their_promises[knn in cells]",),
    ),
    Fault(
        "cells-by-row-number",
        "A record's cell depends on its place in the table.",
        "pl_privknn.neighbors.cells",
        {
            "self._cells = assign(table, centroids, device=device)[:, 0]": "self._cells = torch.arange(len(table)) % len(centroids)",
        },
        ("test_cells::test_one_record_moves_the_votes_by_root_two_at_most",),
    ),
    Fault(
        "radius-of-private-features",
        "The radius follows the density of the private records.",
        "pl_privknn.labelers.private_radius",
        {
            "        if self._radius is None:\n": "        self.fit_public(features)\n        if self._radius is None:\n",
        },
        ("test_check_labeler::test_labelers_keep_their_promises[radius]",),
    ),
    Fault(
        "radius-votes-cut-at-the-sum",
        "Where many vote, the cut depends on the others: a record moves two counts.",
        "pl_privknn.labelers.private_radius",
        {
            "votes.clamp(max=self._most)": "votes * self._most // votes.sum(dim=1, keepdim=True).clamp(min=self._most)",
        },
        ("test_private_radius::test_one_record_moves_one_count_by_one",),
    ),
    Fault(
        "half-noise-private-knn",
        "Answers of Private-kNN carry half the noise that was charged.",
        "pl_privknn.labelers.aggregation",
        {
            "return asked, self.noise.argmax(private, noise)": "return asked, self.noise.argmax(2 * private, noise)",
        },
        ("test_private_knn::test_same_distribution_as_the_literal_algorithm",),
    ),
    Fault(
        "half-screening-noise-private-knn",
        "The screening draws with another object than the one that is charged.",
        "pl_privknn.labelers.aggregation",
        {
            "asked = asked[self.screening.passes(": "asked = asked[dataclasses.replace(self.screening, sigma=self.screening.sigma / 2).passes(",
        },
        ("test_private_knn::test_same_distribution_as_the_literal_algorithm",),
    ),
    Fault(
        "screening-unpaid",
        "Whether a query passes is told for nothing.",
        "pl_privknn.labelers.aggregation",
        {
            'noise = pay(self.screening, num_queries, "screening")': "import pl_privknn.privacy.noise as free; noise = free.default_noise()",
        },
        ("test_private_knn::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "one-answer-unpaid",
        "The last answer of every batch is free.",
        "pl_privknn.labelers.aggregation",
        {
            "noise = pay(self.noise, len(asked), self.key)": "noise = pay(self.noise, max(1, len(asked) - 1), self.key)",
        },
        ("test_private_knn::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "one-sample-for-two-releases",
        "Screening and answer look at the same sample, whose amplification is charged twice.",
        "pl_privknn.labelers.aggregation",
        {
            "votes(asked, noise).max(dim=1)": "(first := votes(asked, noise)).max(dim=1)",
            "private = votes(asked, noise)": "private = votes(asked, noise) if self.screening is None else first[asked]",
        },
        ("test_private_knn::test_same_distribution_as_the_literal_algorithm",),
    ),
    Fault(
        "knn-votes-sensitivity-one-l2",
        "A record that enters the neighbourhood is charged one vote, where two change.",
        "pl_privknn.labelers.private_knn",
        {
            "KNN_VOTES_L2 = math.sqrt(2.0)": "KNN_VOTES_L2 = 1.0",
        },
        ("test_private_knn::test_sensitivities_are_those_of_votes_that_move",),
    ),
    Fault(
        "knn-votes-sensitivity-one-l1",
        "As much, for Laplace noise.",
        "pl_privknn.labelers.private_knn",
        {
            "KNN_VOTES_L1 = 2.0": "KNN_VOTES_L1 = 1.0",
        },
        ("test_private_knn::test_sensitivities_are_those_of_votes_that_move",),
    ),
    Fault(
        "answers-beyond-the-cap-private-knn",
        "More answers than the plan has.",
        "pl_privknn.labelers.aggregation",
        {
            "asked = asked[:max_answers]": "asked = asked[:]",
        },
        ("test_private_knn::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "plan-of-private-knn-without-screening",
        "The promise leaves the screenings out.",
        "pl_privknn.labelers.aggregation",
        {
            "charges = [] if self.screening is None or not num_queries else [Charge(self.screening, num_queries)]": "charges: list[Charge] = []",
        },
        ("test_private_knn::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "plan-of-one-answer-private-knn",
        "The promise covers one answer.",
        "pl_privknn.labelers.aggregation",
        {
            "return [*charges, Charge(self.noise, answers)] if answers else charges": "return [*charges, Charge(self.noise, 1)] if answers else charges",
        },
        ("test_private_knn::test_charges_are_those_of_the_plan_and_use_the_objects_that_draw",),
    ),
    Fault(
        "queries-shifted-by-private-mean",
        "Every answer depends on all records by way of their mean.",
        "pl_privknn.labelers.aggregation",
        {
            "ranked = neighbors.rank(queries)": "ranked = neighbors.rank(queries - neighbors._table.mean(dim=0))",
        },
        ("test_private_knn::test_little_noise_gives_the_plain_majority",),
    ),
    Fault(
        "features-normalised-by-private-statistics",
        "Distances depend on the spread of all records.",
        "pl_privknn.labelers.private_knn",
        {
            "PoissonNeighbors, features, labels, num_classes, self.k": "PoissonNeighbors, features / features.std(dim=0).clamp(min=1e-6), labels, num_classes, self.k",
        },
        ("test_private_knn::test_little_noise_gives_the_plain_majority",),
    ),
    Fault(
        "threshold-from-private-labels",
        "The screening's threshold follows the largest private class.",
        "pl_privknn.labelers.aggregation",
        {
            "        self._aggregation = aggregation\n": "        if (screening := aggregation.screening) is not None:\n            share = float(labels.bincount().max()) / len(labels) * num_classes\n            screening = dataclasses.replace(screening, threshold=min(self.k, screening.threshold * share))\n        self._aggregation = dataclasses.replace(aggregation, screening=screening)\n",
        },
        ("test_charges::test_what_is_charged_does_not_depend_on_the_private_table[private_knn]",),
    ),
    Fault(
        "sample-at-double-rate",
        "Records take part twice as often as accounted.",
        "pl_privknn.neighbors.poisson",
        {
            "toss(coins, indices.shape, self.sampling_rate)": "toss(coins, indices.shape, min(1.0, 2 * self.sampling_rate))",
        },
        ("test_poisson_neighbors::test_votes_have_the_distribution_of_literal_sampling[30-4-0.5-None-2]",),
    ),
    Fault(
        "sample-of-fixed-size",
        "Samples of a fixed size are accounted as Poisson samples.",
        "pl_privknn.neighbors.poisson",
        {
            "toss(coins, indices.shape, self.sampling_rate)": (
                "torch.rand(indices.shape).argsort(dim=1) < round(self.sampling_rate * indices.shape[1])"
            ),
        },
        ("test_poisson_neighbors::test_a_record_votes_at_most_once_and_the_nearest_first",),
    ),
    Fault(
        "sample-with-replacement",
        "A record may vote twice.",
        "pl_privknn.neighbors.poisson",
        {
            "            self.add(totals, row, places,": (
                "            index = index[:, torch.randint(indices.shape[1], (indices.shape[1],)).sort().values]\n"
                "            self.add(totals, row, places,"
            ),
        },
        ("test_poisson_neighbors::test_a_record_votes_at_most_once_and_the_nearest_first",),
    ),
    Fault(
        "one-sample-for-all-queries",
        "All queries of a batch look at one sample, accounted as many.",
        "pl_privknn.neighbors.poisson",
        {
            "toss(coins, indices.shape, self.sampling_rate)": (
                "toss(coins, indices.shape[1:], self.sampling_rate).expand(indices.shape)"
            ),
        },
        ("test_poisson_neighbors::test_votes_have_the_distribution_of_literal_sampling[30-4-0.5-None-2]",),
    ),
    Fault(
        "record-walked-over-twice",
        "Where a list is made longer, its records toss again and may vote twice.",
        "pl_privknn.neighbors.poisson",
        {
            "(walked_over.gather(1, place) == longer[part]).to(torch.uint8)": "torch.zeros(longer[part].shape, dtype=torch.uint8)",
        },
        ("test_poisson_neighbors::test_a_record_votes_at_most_once_and_the_nearest_first",),
    ),
    Fault(
        "parts-of-a-long-table-not-numbered-on",
        "Each part's records are named as if it were the first: others vote in their place.",
        "pl_privknn.neighbors.search",
        {"            indices.append(near + start)": "            indices.append(near)"},
        ("test_long_tables::test_parts_change_nothing[votes-50]",),
    ),
    Fault(
        "ties-across-parts-to-the-last",
        "Of two equally near records in two parts the later one votes, within a part the earlier: a shift changes several votes.",
        "pl_privknn.neighbors.search",
        {
            "in range(0, len(records.table), _ROWS_OF_A_PART)": "in range(0, len(records.table), _ROWS_OF_A_PART)[::-1]",
        },
        ("test_long_tables::test_parts_change_nothing[top_k-50]",),
    ),
    Fault(
        "k-plus-one-neighbours-vote",
        "One neighbour more votes than the screening's family has.",
        "pl_privknn.neighbors.poisson",
        {
            "accepted.cumsum(dim=1, dtype=index.dtype) <= need": "accepted.cumsum(dim=1, dtype=index.dtype) <= need + 1",
        },
        ("test_poisson_neighbors::test_a_record_votes_at_most_once_and_the_nearest_first",),
    ),
    Fault(
        "coins-at-a-higher-rate-radius",
        "Records within a radius vote more often than accounted.",
        "pl_privknn.neighbors.radius",
        {
            "toss(coins, tuple(part.shape), self.sampling_rate)": "toss(coins, tuple(part.shape), min(1.0, 1.5 * self.sampling_rate))",
        },
        ("test_poisson_neighbors::test_radius_votes_have_the_distribution_of_literal_sampling",),
    ),
    Fault(
        "user-noise-keeps-its-sensitivity",
        "A mechanism that was given keeps sensitivity 1.",
        "pl_privknn.privacy.mechanisms.vote_noise",
        {
            "completed: _Noise = dataclasses.replace(self, **wanted)": "completed: _Noise = dataclasses.replace(self)",
        },
        ("test_private_knn::test_sensitivities_are_those_of_votes_that_move",),
    ),
    Fault(
        "winner-priced-noise-shows-counts",
        "All counts are shown at the price of the winner, by a mechanism that only covers the winner.",
        "pl_privknn.labelers.aggregation",
        {
            "if counts and not isinstance(noise, AdditiveNoise):": "if False:",
        },
        ("test_release_counts::test_a_mechanism_that_is_paid_for_the_winner_alone_shows_no_counts",),
    ),
    Fault(
        "exact-counts-beside-noisy-labels",
        "The counts that are shown carry no noise.",
        "pl_privknn.labelers.aggregation",
        {
            "return asked, self.additive.add_noise(private, noise)": "return asked, private",
        },
        ("test_release_counts::test_counts_carry_exactly_the_noise_that_was_paid_for",),
    ),
)
