"""The released centre of private features: sums, cost, what it subtracts, and what a crash leaves of it."""

import contextlib
import math

import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PreconditionedGradients, SufficientStatistics
from pl_privknn.labelers.centre import ERROR_RATE, centre_of
from pl_privknn.labelers.released_sums import CENTRE, ReleaseLostError, write_release
from pl_privknn.privacy import Budget, account
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.testing import FreeLedger, check_labeler
from tests.labelers.statistics.statistics_setup import MADE, exact_sum, fitted, table, with_table
from tests.setup.grouped import grouped
from tests.setup.refusals import refusals

SHIFT = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0])
NAMES = pytest.mark.parametrize("name", MADE)


def shifted(count=60, seed=0):
    features, classes = table(count, seed=seed)
    return features + SHIFT, classes


def gradients(**given):
    return PreconditionedGradients(
        **grouped(
            PreconditionedGradients, **{"private_records": 60, "releases": 3, "centre_share": 0.3, **given}
        )
    )


# ---------------------------------------------------------------------------- sums and cost


@NAMES
def test_the_first_release_is_the_sum_of_differences_from_the_public_mean(name):
    teacher = fitted(MADE[name](noise_multiplier=1e-6, centre_share=0.3), *shifted())
    unit = teacher.unit_vectors(shifted()[0])
    public = teacher.unit_vectors(table(40, seed=7)[0])
    rows = unit - public.mean(dim=0)
    rows /= rows.norm(dim=1, keepdim=True).clamp(min=1)
    teacher.label(table()[0], FreeLedger())
    torch.testing.assert_close(teacher.noisy_sums[CENTRE].noisy[0], rows.sum(dim=0), atol=1e-3, rtol=0)
    of_public = public - public.mean(dim=0)
    of_public /= of_public.norm(dim=1, keepdim=True).clamp(min=1)
    offset = rows.mean(dim=0) - of_public.mean(dim=0)
    torch.testing.assert_close(teacher.centre.offset, offset, atol=1e-4, rtol=0)
    assert teacher.centre.is_shift
    # What later sums are made of.
    moved = unit - teacher.centre.offset
    moved /= moved.norm(dim=1, keepdim=True)
    torch.testing.assert_close(teacher.inputs(shifted()[0], private=True)[:, : unit.shape[1]], moved)
    torch.testing.assert_close(teacher.inputs(shifted()[0])[:, : unit.shape[1]], unit)


def test_a_person_adds_the_mean_of_their_records():
    teacher = gradients(noise_multiplier=1.0, records_per_person=3, noise_source=SeededNoise(0))
    features, classes = shifted(6)
    fitted(teacher, features, classes, owners=torch.tensor([0, 0, 1, 1, 1, 2]))
    rows = teacher.unit_vectors(features) - teacher.unit_vectors(table(40, seed=7)[0]).mean(dim=0)
    rows /= rows.norm(dim=1, keepdim=True).clamp(min=1)
    expected = rows[:2].mean(dim=0) + rows[2:5].mean(dim=0) + rows[5]
    weights = torch.zeros(3, 6, dtype=torch.float64)
    torch.testing.assert_close(exact_sum(teacher, CENTRE, weights)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_record_moves_the_centre_by_more_than_its_sensitivity(adjacency):
    teacher = fitted(gradients(noise_multiplier=1.0, adjacency=adjacency))
    rows = torch.cat([1e-6 * torch.eye(5), 3 * torch.eye(5), -torch.eye(5), torch.full((2, 5), 3e38)])
    weights = torch.zeros(3, 6, dtype=torch.float64)
    parts = torch.cat(
        [exact_sum(with_table(teacher, row[None], torch.tensor([0])), CENTRE, weights) for row in rows]
    )
    moved = parts if adjacency == "add_remove" else parts[:, None] - parts
    bound = teacher.mechanism(CENTRE).l2_sensitivity
    assert bound == (1 if adjacency == "add_remove" else 2)
    assert 0.7 * bound < float(moved.norm(dim=-1).max()) <= bound


@pytest.mark.parametrize(("share", "adjacency"), [(0.2, "add_remove"), (0.6, "replace_one")])
def test_the_plan_is_one_gaussian_of_the_whole_budget(share, adjacency):
    teacher = gradients(epsilon=0.7, delta=1e-6, centre_share=share, adjacency=adjacency)
    plan = teacher.plan(100, 100, 3)
    report = account(plan, delta=1e-6, adjacency=adjacency)
    assert 0.995 * 0.7 < report.epsilon <= 0.7
    events = [
        GaussianDpEvent(charge.mechanism.sigma / charge.mechanism.l2_sensitivity)
        for charge in plan
        for _ in range(charge.count)
    ]
    assert len(events) == 4
    other = PLDAccountant().compose(ComposedDpEvent(events)).get_epsilon(1e-6)
    assert report.epsilon == pytest.approx(other, rel=1e-3)
    # The centre has its share of μ.
    total = math.sqrt(sum(event.noise_multiplier**-2 for event in events))
    assert 1 / teacher.centre_noise / total == pytest.approx(share)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_no_neighbouring_table_moves_a_release_by_more_than_its_charge(adjacency):
    teacher = SufficientStatistics(
        budget=Budget(adjacency=adjacency),
        noise_multiplier=0.1,
        private_records=30,
        records_per_person=3,
        centre_share=0.9,
    )
    for largest in check_labeler(teacher).largest.values():
        assert all(0.9 * move.allowed < move.amount for move in largest.moves.values())


# ---------------------------------------------------------------------------- the test of a shift


def test_means_of_one_distribution_pass_for_a_shift_as_often_as_stated():
    generator, found = torch.Generator().manual_seed(0), []
    scales = torch.linspace(0.02, 0.2, 8)
    for _ in range(400):
        public, private = (torch.randn(count, 8, generator=generator).double() * scales for count in (50, 80))
        noisy = (private - public.mean(dim=0)).sum(dim=0) + 2 * torch.randn(8, generator=generator)
        found.append(centre_of(noisy, 2.0, 80, public).p_value)
    shares = torch.tensor(found)
    assert float((shares < 0.1).double().mean()) == pytest.approx(0.1, abs=0.06)
    assert int((shares < ERROR_RATE).sum()) <= 4


@pytest.mark.parametrize("kind", ["same", "other"])
def test_only_a_shift_is_subtracted(kind):
    records = table(2000, seed=4) if kind == "same" else shifted(2000, seed=4)
    teacher = gradients(noise_multiplier=8.0, private_records=2000, noise_source=SeededNoise(2))
    teacher.fit(PrivateRecords.of(*records, 3, public=table(2000, seed=7)[0]))
    teacher.label(table()[0], FreeLedger())
    state = teacher.head_state()
    assert ("of another kind" in teacher.remark(state)) == (kind == "other")
    queries = records[0][:50]
    assert torch.equal(teacher.inputs(queries, private=True), teacher.inputs(queries)) == (kind == "same")
    # The model for private-like examples, made of its state alone.
    model = gradients(noise_multiplier=8.0, private_records=2000).head(state)
    right = (model(records[0]).argmax(dim=1) == records[1]).double().mean()
    assert right > 0.9
    if kind == "other":
        unmoved = teacher.predict(records[0], state["weights"]).argmax(dim=1) == records[1]
        assert right > unmoved.double().mean() + 0.05


def persons(count, seed):
    """Records of persons, of whom the active third has another class, with their owners."""
    generator = torch.Generator().manual_seed(seed)
    many = torch.arange(count) % 3 == 0
    owners = torch.arange(count).repeat_interleave(torch.where(many, 10, 1))
    classes = (many[owners] ^ (torch.rand(len(owners), generator=generator) < 0.1)).long()
    centre = torch.zeros(len(owners), 5).index_fill_(1, torch.tensor([4]), 3.0)
    centre[:, 0] = 2.0 * classes - 1
    return centre + 0.7 * torch.randn(len(owners), 5, generator=generator), classes, owners


def test_one_model_answers_where_only_shares_of_classes_differ_between_persons_and_rows():
    features, classes, owners = persons(1900, seed=1)
    rows, truth, _ = persons(150, seed=2)
    budget = Budget(1.0, 1e-5, unit="person")
    teacher = PreconditionedGradients(
        budget, private_records=1900, centre_share=0.2, noise_source=SeededNoise(3)
    )
    teacher.fit(PrivateRecords.of(features, classes, 2, owners=owners, public=rows))
    answers = teacher.label(rows, FreeLedger())
    assert teacher.centre.is_shift
    assert teacher.centre.distance < 0.4
    state = teacher.head_state()
    assert not teacher.remark(state)
    torch.testing.assert_close(teacher.head(state)(rows).float(), answers.probabilities)
    right = float((answers.labels == truth).double().mean())
    # Answers for rows as they are give an average person's classes to active persons' rows.
    unmoved = teacher.predict(rows, state["weights"]).argmax(dim=1)
    assert right > float((unmoved == truth).double().mean()) + 0.02
    assert right > 0.8


# ---------------------------------------------------------------------------- runs, crashes, shards


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_killed_run_draws_nothing_twice(tmp_path, monkeypatch, lost):
    ledger, queries = Ledger(tmp_path / "ledger.sqlite"), table(30, seed=5)[0]
    teacher, resumed = (gradients(noise_multiplier=0.5) for _ in range(2))
    handle = ledger.run("a", plan=teacher.plan(30, 30, 3))
    teacher.join_run(tmp_path / "kept", teacher.paying(handle))

    def keep(*kept):
        if lost is not None and teacher._charged > lost:
            raise KeyboardInterrupt
        write_release(*kept)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr("pl_privknn.labelers.released_sums.write_release", keep)
        fitted(teacher, *shifted()).label(queries, handle)
    teacher.leave_run()
    handle = ledger.run("a")
    resumed.join_run(tmp_path / "kept", resumed.paying(handle))
    fitted(resumed, *shifted()).label(queries, handle)
    assert handle.num_charges == 4
    numbers = [CENTRE, 0, 1, 2]
    assert sorted(resumed.noisy_sums) == [number for place, number in enumerate(numbers) if place != lost]
    assert (resumed.centre is None) == (lost == 0)
    if lost is None:
        torch.testing.assert_close(resumed.centre.offset, teacher.centre.offset)


def test_a_centre_without_any_sum_is_no_model(tmp_path):
    teacher = SufficientStatistics(noise_multiplier=0.5, private_records=60, centre_share=0.3)
    handle = Ledger(tmp_path / "ledger.sqlite").run("a", plan=teacher.plan(30, 30, 3))
    fitted(teacher)
    teacher.join_run(tmp_path / "kept", teacher.paying(handle))
    handle.charge(teacher.mechanism(CENTRE))
    handle.charge(teacher.mechanism(0))
    teacher.leave_run()
    again = SufficientStatistics(noise_multiplier=0.5, private_records=60, centre_share=0.3)
    with pytest.raises(ReleaseLostError, match="not drawn again"):
        again.join_run(tmp_path / "kept", again.paying(handle))


# ---------------------------------------------------------------------------- arguments


test_bad_arguments_are_named = refusals(
    {
        r"centre_share=0": lambda: gradients(epsilon=1.0, centre_share=0.0),
        r"centre_share=1": lambda: gradients(epsilon=1.0, centre_share=1.0),
        r"centre_share='yes'": lambda: gradients(epsilon=1.0, centre_share="yes"),
        r"centre_share=1e-09 leaves noise above 2\*\*20": lambda: gradients(
            noise_multiplier=9.0, centre_share=1e-9
        ),
        r"centre_share=0.3: of 5 features the noise has length .*, and a feature vector 1; leave it out": lambda: (
            fitted(gradients(epsilon=0.1))
        ),
    }
)


@pytest.mark.parametrize(("apart", "p_value"), [(0.0, 1.0), (0.5, 0.0)])
def test_equal_public_examples_have_no_difference_by_chance(apart, p_value):
    public = torch.zeros(20, 4, dtype=torch.float64)
    found = centre_of(torch.full((4,), 10 * apart, dtype=torch.float64), 0.0, 10, public)
    assert found.p_value == p_value
