"""Public prototypes: what is chosen, with which probability, and what one record may change."""

import itertools
import math

import pytest
import torch
from scipy.stats import chisquare
from statistics_setup import fitted, table

from pl_privknn.labelers import PublicPrototypes
from pl_privknn.labelers.statistics.teacher import ReleaseLostError
from pl_privknn.privacy.accounting.accountant import account, delta_for_epsilon
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger

ADJACENCIES = pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])


def utilities(teacher, rows, labels, public):
    """By definition, record by record."""
    found = torch.zeros(3, len(public), dtype=torch.float64)
    for row, label in zip(rows.double(), labels, strict=True):
        for place, other in enumerate(public.double()):
            cosine = float(row @ other / (row.norm() * other.norm()))
            found[label, place] += min(1.0, max(0.0, (cosine - teacher.low) / (teacher.high - teacher.low)))
    return found


def test_utilities_are_clipped_cosines_of_a_class_s_records():
    teacher = fitted(PublicPrototypes(epsilon=1.0, low=-0.5, high=0.75))
    found = teacher.private_sum(0, torch.zeros(3, 5))
    torch.testing.assert_close(found, utilities(teacher, *table(), table(40, seed=7)[0]))


def test_examples_are_chosen_with_the_exponential_mechanism_s_probabilities():
    teacher = fitted(PublicPrototypes(epsilon=0.5), *table(9))
    likely = (utilities(teacher, *table(9), table(40, seed=7)[0]) * 0.5).softmax(dim=1)
    public, counts = teacher.inputs(table(40, seed=7)[0]), torch.zeros(3, 40)
    draws, noise = 4000, SeededNoise(0)
    mechanism, sums = teacher.mechanism(0), teacher.private_sum(0, torch.zeros(3, 5))
    for draw in range(draws):
        chosen = teacher.drawn(0, mechanism, sums, noise.stream(draw))
        counts[torch.arange(3), (chosen[:, None] == public).all(dim=2).int().argmax(dim=1)] += 1
    for seen, wanted in zip(counts, likely, strict=True):
        assert chisquare(seen.numpy(), draws * wanted.numpy()).pvalue > 1e-4


def worst_delta(teacher, one, other, epsilon):
    """δ by which the joint choice of all classes tells two tables apart, from its exact probabilities."""
    scaled = [sums / teacher.noise_multiplier for sums in (one, other)]
    p, q = (
        torch.einsum("a,b,c->abc", *scores.softmax(dim=1)).flatten() for scores in scaled
    )  # all outcomes of three classes
    return max(float((x - math.exp(epsilon) * y).clamp(min=0).sum()) for x, y in ((p, q), (q, p)))


@ADJACENCIES
def test_no_neighbour_is_told_apart_by_more_than_is_charged(adjacency):
    teacher = PublicPrototypes(epsilon=1.5, adjacency=adjacency)
    # One example as each class likes it, and its opposite: a record moves their odds the most.
    public = torch.cat([torch.eye(5)[:2], -torch.eye(5)[:2], table(3, seed=7)[0]])
    teacher.fit_public(public)
    plan = teacher.plan(10, 10, 3)

    def sums(extra):
        rows, labels = table(6)
        for row, label in extra:
            rows, labels = torch.cat([rows, row[None]]), torch.cat([labels, torch.tensor([label])])
        teacher.fit(rows, labels, 3)
        return teacher.private_sum(0, torch.zeros(3, 5))

    records = list(itertools.product([*torch.eye(5)[:2], *-torch.eye(5)[:2], torch.ones(5) * 1e20], range(3)))
    if adjacency == "add_remove":
        pairs = [(sums([record]), sums([])) for record in records]
    else:
        pairs = [(sums([one]), sums([other])) for one, other in itertools.combinations(records, 2)]
    closest = 0.0
    for epsilon in (0.0, 0.4, 0.8, 1.2):
        stated = delta_for_epsilon(plan, epsilon, adjacency=adjacency)
        for pair in pairs:
            found = worst_delta(teacher, *pair, epsilon)
            assert found <= stated * (1 + 1e-6)
            closest = max(closest, found / stated)
    assert closest > 0.6  # what is charged is no larger than it has to be
    assert account(plan, delta=1e-12, adjacency=adjacency).epsilon == pytest.approx(1.5, rel=1e-3)


def test_a_class_of_few_records_is_kept():
    """Thirty records beside three thousand; a sum over all would need their share of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(8)[:3]
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate((1500, 1500, 30))])
    rows = centres[labels] + 0.2 * torch.randn(len(labels), 8, generator=generator)
    truth = torch.arange(60) % 3
    public = centres[truth] + 0.2 * torch.randn(60, 8, generator=generator)
    right = []
    for seed in range(20):
        teacher = PublicPrototypes(epsilon=1.0, noise_source=SeededNoise(seed))
        teacher.fit_public(public)
        teacher.fit(rows, labels, 3)
        right.append(teacher.label(public, FreeLedger()).labels == truth)
    # The best example of the small class has 30 · cos against about 5: wrong with probability below 1e-6 a draw.
    assert float(torch.stack(right).float().mean()) > 0.95


def test_one_choice_serves_all_rounds_and_a_resumed_run(tmp_path):
    ledger, queries = Ledger(tmp_path / "ledger.sqlite"), table(30, seed=5)[0]
    teacher = fitted(PublicPrototypes(epsilon=1.0))
    run = ledger.run("a", plan=teacher.plan(30, 30, 3, rounds=4))
    teacher.join_run(tmp_path / "kept", run)
    first = teacher.label(queries[:10], run)
    torch.testing.assert_close(fitted(teacher).label(queries, run).soft[:10], first.soft)
    assert run.num_charges == 1
    teacher.leave_run()
    resumed, handle = PublicPrototypes(epsilon=1.0), ledger.run("a")
    resumed.join_run(tmp_path / "kept", handle)
    torch.testing.assert_close(fitted(resumed).label(queries[:10], handle).soft, first.soft)
    assert handle.num_charges == 1
    head = PublicPrototypes(epsilon=1.0).head(teacher.head_state())
    torch.testing.assert_close(head(queries[:10]).float(), first.soft)
    (tmp_path / "kept" / "releases.pt").unlink()
    with pytest.raises(ReleaseLostError, match="not drawn again"):
        PublicPrototypes(epsilon=1.0).join_run(tmp_path / "kept", ledger.run("a"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0"),
        ({"low": 0.5, "high": 0.5}, r"low=0.5, high=0.5: want cosines"),
        ({"high": 1.5}, "high=1.5"),
        ({"temperature": 0.0}, "temperature=0"),
        ({"adjacency": "near"}, "adjacency='near'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PublicPrototypes(**{"epsilon": 1.0, **arguments})
