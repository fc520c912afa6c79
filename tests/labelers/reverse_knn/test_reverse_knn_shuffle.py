"""Shuffle-model protocols: cost against literal enumeration, messages against simulation, labelers end to end."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import LocalReverseKNN, ReverseKNN, ShuffledReverseKNN
from pl_privknn.labelers.local import MultiMessage, SingleMessage
from pl_privknn.labelers.reverse_knn import CountTable, true_counts
from pl_privknn.privacy import Budget
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.mechanisms import Charge, NegativeBinomial
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger
from tests.setup.grouped import grouped
from tests.setup.refusals import refusals

TABLE = CountTable(4, 3)


@pytest.mark.parametrize(("shape", "ratio"), [(3.0, 0.5), (8.5, 0.8)])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_negative_binomial_costs_the_hockey_stick_of_its_cells(shape, ratio, adjacency):
    x = np.arange(400)
    without = stats.nbinom.pmf(x, shape, 1 - ratio)
    with_vote = np.concatenate([[0.0], without[:-1]])
    if adjacency == "add_remove":
        pairs = [(with_vote, without), (without, with_vote)]
    else:  # the vote leaves one cell and joins another
        pairs = [(np.outer(with_vote, without), np.outer(without, with_vote))]
    mechanism = NegativeBinomial(shape, ratio)
    for delta in (0.3, 0.15, 0.05):
        epsilon = account([Charge(mechanism)], delta=delta, adjacency=adjacency).epsilon
        literal = max(np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in pairs)
        if math.isinf(epsilon):  # no noise at all in a cell, with probability P(0), gives a missing vote away
            assert delta < without[0] * 1.001
        elif epsilon == 0.0:
            assert literal <= delta
        else:
            assert literal == pytest.approx(delta, rel=0.01)
            assert literal <= delta * (1 + 1e-6)


def test_two_votes_cost_more_than_one_and_as_much_as_two_independent_releases():
    one, two = NegativeBinomial(20.0, 0.9), NegativeBinomial(20.0, 0.9, moved=2)
    composed, found = (
        account([charge], delta=1e-4, adjacency="replace_one").epsilon
        for charge in (Charge(one, 2), Charge(two))
    )
    assert found == pytest.approx(composed, rel=0.01)


def test_shares_of_all_clients_add_up_to_the_noise():
    noise = NegativeBinomial(5.0, 0.7)
    cells = 3000
    total = sum(noise.share(cells, 40, SeededNoise(seed)) for seed in range(40))
    top = 60
    expected = stats.nbinom.pmf(np.arange(top), 5.0, 0.3) * cells
    for drawn in (total, noise.draw(torch.zeros(cells, dtype=torch.int64), SeededNoise(99))):
        found = torch.bincount(drawn, minlength=top)[:top].numpy()
        keep = expected > 5
        chi = ((found[keep] - expected[keep]) ** 2 / expected[keep]).sum()
        # Two χ² tests at 1e-4.
        assert stats.chi2.sf(chi, keep.sum()) > 1e-4
        assert drawn.double().mean() == pytest.approx(noise.mean, rel=0.05)
        assert drawn.double().var() == pytest.approx(noise.variance, rel=0.1)


def records(n):
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(4, (n, 1), generator=generator), torch.randint(3, (n, 1), generator=generator))


@pytest.mark.long("shares")
@pytest.mark.parametrize("kind", ["single", "shares"])
def test_messages_are_shuffled_objects_with_the_distribution_of_the_simulation(kind):
    nearest, labels = records(50)
    protocol = (
        SingleMessage("collision", 2.0, TABLE, 50)
        if kind == "single"
        else MultiMessage(NegativeBinomial(4.0, 0.6), TABLE, 50)
    )
    true = true_counts(TABLE, nearest, labels).view(4, 3).double()
    runs = [protocol.aggregate(protocol.messages(nearest, labels, SeededNoise(seed))) for seed in range(150)]
    quick = [protocol.simulate(nearest, labels, SeededNoise(1000 + seed)) for seed in range(150)]
    for found in (torch.stack(runs), torch.stack(quick)):
        error = found.std(dim=0) / math.sqrt(150)
        # 48 cells at 4.5 standard errors.
        assert ((found.mean(dim=0) - true).abs() < 4.5 * error).all()
    for cell in ((0, 0), (3, 2)):
        a, b = ([float(run[cell]) for run in found] for found in (runs, quick))
        assert stats.ks_2samp(a, b).pvalue > 1e-4
    # Order tells nothing: the first message comes from any client.
    firsts = {tuple(protocol.messages(nearest, labels, SeededNoise(seed))[0].tolist()) for seed in range(20)}
    assert len(firsts) > 3


def clusters():
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(3000) % 3
    return torch.eye(3)[labels] * 5 + torch.rand(3000, 3, generator=generator), labels


@pytest.mark.long("shuffle-collision")
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (LocalReverseKNN, {"epsilon": 2.0}),
        (LocalReverseKNN, {"epsilon": 2.0, "randomizer": "randomized_response"}),
        (ShuffledReverseKNN, {"epsilon": 1.0, "num_clients": 3000}),
        (ShuffledReverseKNN, {"epsilon": 1.0, "num_clients": 3000, "randomizer": "shares"}),
    ],
    ids=["local-collision", "local-bits", "shuffle-collision", "shuffle-shares"],
)
def test_labelers_answer_and_pay_without_a_curator(tmp_path, cls, settings):
    features, labels = clusters()
    labeler = cls(**grouped(cls, adjacency="replace_one", **settings), noise_source=SeededNoise(3))
    assert labeler.adjacencies == ("replace_one",)
    labeler.fit(PrivateRecords.of(features, labels, 3))
    plan = labeler.plan(3, 3, 3)
    run = Ledger(tmp_path / "l.sqlite", Budget(adjacency="replace_one")).run("a", plan=plan)
    release = labeler.label(torch.eye(3) * 5.5, run)
    assert release.labels.tolist() == [0, 1, 2]
    assert release.scores.shape == (3, 3)
    epsilon = account(plan, delta=1e-5, adjacency="replace_one").epsilon
    assert 0.97 * settings["epsilon"] < epsilon <= settings["epsilon"]
    if cls is ShuffledReverseKNN:  # fewer clients than stated are refused before anything is paid
        charges = run.num_charges
        with pytest.raises(ValueError, match="num_clients=3000"):
            labeler.fit(PrivateRecords.of(features[1:], labels[1:], 3))
        with pytest.raises(ValueError, match="num_clients=3000"):
            labeler.label(torch.eye(3), run)
        assert run.num_charges == charges


def made(cls, **given):
    return lambda: cls(**grouped(cls, **{"epsilon": 1.0, "adjacency": "replace_one", **given}))


test_bad_arguments_are_named = refusals(
    {
        "randomizer='shares'": made(LocalReverseKNN, randomizer="shares"),
        "num_clients=1": made(ShuffledReverseKNN, num_clients=1),
        "delta=2": made(ShuffledReverseKNN, num_clients=10, delta=2.0),
    }
)


def test_how_records_are_spread_over_clients_changes_nothing():
    features, labels = clusters()
    queries, whole, total = torch.eye(3) * 5.5, ReverseKNN(budget=Budget(epsilon=1.0)), 0
    whole.fit(PrivateRecords.of(features, labels, 3))
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(4))
    for chosen in order.tensor_split([10, 700, 701]):
        client = ReverseKNN(budget=Budget(epsilon=1.0))
        client.fit(PrivateRecords.of(features[chosen], labels[chosen], 3))
        total += client.counts(queries)
    assert torch.equal(total, whole.counts(queries))
    # One release of the sum is that of the whole table, at the same price.
    server, ledgers = (
        ReverseKNN(budget=Budget(epsilon=1.0), noise_source=SeededNoise(5)),
        (FreeLedger(), FreeLedger()),
    )
    whole.noise_source = SeededNoise(5)
    from_clients, from_table = (
        server.release(total, server.paying(ledgers[0])),
        whole.label(queries, ledgers[1]),
    )
    assert ledgers[0].rows == ledgers[1].rows
    assert [(row.mechanism, row.count) for row in ledgers[0].rows] == [(whole.mechanism(3), 1)]
    assert torch.equal(from_clients.scores, from_table.scores)
    assert torch.equal(from_clients.labels, from_table.labels)


def test_released_counts_are_whole_and_not_negative():
    whole, ledger = {"dtype": torch.int64}, FreeLedger()
    for counts in (torch.zeros(2, 2), torch.zeros(2, **whole), -torch.ones(2, 2, **whole)):
        with pytest.raises(ValueError, match="counts"):
            ReverseKNN(budget=Budget(epsilon=1.0)).release(counts, ledger)
    assert ledger.rows == []
