"""Correlated noise: its matrix, who takes part and when, and what a cycle of steps costs."""

import copy
import itertools
import math
import pickle

import dp_accounting
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from dp_accounting.pld import PLDAccountant
from noisy_sgd_setup import PRIVATE, NoNoise, charged, keep_last, make_data, power_cut_at
from training_setup import Lit, fit, training

from pl_privknn.datamodules.formats.poisson_loader import PoissonTraining
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, DiscreteGaussian, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.store import read_rows
from pl_privknn.privacy.verification import check_summary
from pl_privknn.training import AdaptiveClipping, BandedNoise, PaidAccuracy, PrivacyGroups
from pl_privknn.training.correlated_noise import CorrelatedSteps


def literal(bands, steps):
    """The square root of the matrix of prefix sums, cut off and scaled: dense, shape ``(steps, steps)``."""
    size = max(bands, steps)
    sums = np.tril(np.ones((size, size)))
    root = np.eye(size)
    for _ in range(60):  # Denman and Beavers' iteration for the square root, on a triangular matrix
        root = (root + np.linalg.solve(root, sums)) / 2
    column = root[:bands, 0] / np.linalg.norm(root[:bands, 0])
    found = np.zeros((steps, steps))
    for t in range(steps):
        kept = column[: steps - t]
        found[t : t + len(kept), t] = kept
    return found


class Ledger:
    """Counts what it is paid."""

    def __init__(self):
        self.counts = []

    def charge(self, mechanism, count, **kwargs):
        self.counts.append(count)
        return len(self.counts)


def paid_steps(bands, steps, together=1, sigma=1.0):
    ledger = Ledger()
    return ledger, CorrelatedSteps(ledger, Gaussian(sigma, 1.0, 0.5), steps, together, BandedNoise(bands))


@pytest.mark.parametrize("bands", [1, 2, 3, 8])
def test_coefficients_are_the_banded_square_root_and_far_columns_share_no_row(bands):
    binomial = [math.comb(2 * k, k) / 4**k for k in range(bands)]
    made = BandedNoise(bands).coefficients
    assert made == pytest.approx([c / math.hypot(*binomial) for c in binomial])
    matrix = literal(bands, 20)
    assert made == pytest.approx(matrix[:bands, 0])
    gram = matrix.T @ matrix
    assert np.diag(gram).max() <= 1 + 1e-12
    assert gram[0, 0] == pytest.approx(1.0)
    for t, u in itertools.combinations(range(20), 2):
        assert (gram[t, u] == 0) == (u - t >= bands)


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_noise_is_the_inverse_of_the_matrix_times_independent_noise(bands):
    steps, size, sigma = 7, 5_000, 3.0
    _, made = paid_steps(bands, steps, sigma=sigma)
    gradients = torch.arange(steps * size, dtype=torch.float32).view(steps, size) / size
    source = SeededNoise(4)
    released = torch.stack([made.release(row, source) for row in gradients])
    noise = (released - gradients.double()).numpy()
    inverse = np.linalg.inv(literal(bands, steps))
    # Literally: each step's own noise comes from the stream of its row.
    keys = [(1 + t // bands, min(bands, steps - t // bands * bands) - 1 - t % bands) for t in range(steps)]
    own = np.stack([source.stream("step", *key).normal((size,), sigma).numpy() for key in keys])
    assert noise == pytest.approx(inverse @ own, rel=1e-9, abs=1e-9)
    # One of 49 covariances is further off than 5 deviations with less than one seed in 10,000.
    expected = sigma**2 * inverse @ inverse.T
    found = noise @ noise.T / size
    scale = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / size)
    assert (np.abs(found - expected) < 5 * scale).all()


@pytest.mark.parametrize(("bands", "steps"), [(1, 3), (2, 5), (3, 7), (4, 6), (4, 3)])
def test_a_record_s_whole_contribution_is_no_more_than_its_releases(bands, steps):
    """Brute force over subsets and coins, with gradients of any direction."""
    matrix, generator = literal(bands, steps), np.random.default_rng(0)
    most = -(-steps // bands)
    for subset in range(bands):
        turns = range(subset, steps, bands)
        for coins in itertools.product([0, 1], repeat=len(turns)):
            for aligned in (True, False):
                gradients = np.zeros((steps, 3))
                for turn, coin in zip(turns, coins, strict=True):
                    direction = np.ones(3) if aligned else generator.standard_normal(3)
                    gradients[turn] = coin * direction / np.linalg.norm(direction)
                assert np.square(matrix @ gradients).sum() <= sum(coins) + 1e-12 <= most + 1e-12
    # A record that came again within a cycle would not be covered.
    if 1 < bands < steps:
        assert np.square(matrix[:, :2].sum(axis=1)).sum() > 2.5


def test_rows_are_for_whole_cycles_and_the_last_one_may_be_cut_off():
    ledger, steps = paid_steps(4, 10, together=5)
    for place in range(10):
        steps.release(torch.zeros(2), SeededNoise(0))
        assert ledger.counts == ([2] if place < 8 else [2, 1])
    with pytest.raises(RuntimeError, match="all planned steps"):
        steps.release(torch.zeros(2), SeededNoise(0))


def test_a_copy_holds_no_noise_and_begins_afresh():
    _, steps = paid_steps(3, 9)
    for _ in range(4):
        steps.release(torch.zeros(5), SeededNoise(0))
    assert len(steps._before) == 2
    steps._ledger = None
    for made in (copy.deepcopy(steps), pickle.loads(pickle.dumps(steps))):
        assert len(made._before) == 0
        assert made._before.maxlen == 2


def test_epsilon_is_that_of_a_sampled_gaussian_a_cycle(tmp_path):
    bands, epochs = 2, 3  # nine steps at rate 2/9 of 90 records: five cycles at rate 4/9
    callback = training(
        expected_batch_size=20, noise_multiplier=1.5, correlated_noise=BandedNoise(bands), steps_per_charge=3
    )
    _, trainer = fit(Lit(), tmp_path, callback, epochs, limit_train_batches=3)
    assert trainer.global_step == callback.planned_steps == 9
    (row,) = charged(tmp_path)
    assert row == (Gaussian(1.5, 1.0, 4 / 9), 5)
    accountant = PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(4 / 9, dp_accounting.GaussianDpEvent(1.5))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, 5))
    assert callback.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)
    assert callback.epsilon_spent == callback.epsilon
    counts = [r["charge"]["count"] for r in read_rows(tmp_path / "ledger.sqlite") if r["kind"] == "charge"]
    assert counts == [2, 2, 1]
    summary = callback.privacy_summary()
    assert (summary["steps"], summary["steps_planned"], summary["bands"]) == (9, 9, 2)
    checks = check_summary(summary, tmp_path / "ledger.sqlite")
    assert {"steps", "steps_planned", "bands", "sampling_rate"} <= {check["name"] for check in checks}
    assert all(check["agrees"] for check in checks)
    forged = {**summary, "bands": 1, "steps": 5}
    wrong = [c["name"] for c in check_summary(forged, tmp_path / "ledger.sqlite") if not c["agrees"]]
    assert sorted(wrong) == ["bands", "steps"]


def test_noise_is_found_for_the_cycles_and_the_accuracies(tmp_path):
    chosen = PaidAccuracy(every_n_steps=3, noise=8.0)
    callback = training(epsilon=2.0, accuracy=chosen, correlated_noise=BandedNoise(2))
    fit(Lit(), tmp_path, callback, 3)  # nine steps at rate 1/3
    (steps, cycles), counts = sorted(charged(tmp_path), key=lambda pair: -pair[1])
    assert (steps.sampling_rate, cycles) == (2 / 3, 5)
    assert counts == (DiscreteGaussian(8.0, 1.0, 1.0), 3)
    assert 1.98 < callback.epsilon <= 2.0
    assert callback.epsilon == account([Charge(steps, 5), Charge(*counts)], delta=1e-5).epsilon
    assert callback.noise_for(9) == pytest.approx(steps.sigma)


def test_training_ends_with_the_last_cycle_that_the_budget_holds(tmp_path):
    step = Gaussian(1.0, 1.0, 2 / 3)
    epsilon = account([Charge(step, 3)], delta=1e-5).epsilon * 1.01
    callback = training(epsilon=epsilon, noise_multiplier=1.0, correlated_noise=BandedNoise(2))
    _, trainer = fit(Lit(), tmp_path, callback, 3)
    assert trainer.global_step == callback.planned_steps == 6
    assert charged(tmp_path) == [(step, 3)]
    assert callback.epsilon <= epsilon


def test_one_band_is_ordinary_noisy_sgd(tmp_path):
    made = []
    for name, chosen in (("with", BandedNoise(1)), ("without", None)):
        module, callback = Lit(), training(correlated_noise=chosen, steps_per_charge=2)
        fit(module, tmp_path / name, callback)
        rows = [r for r in read_rows(tmp_path / name / "ledger.sqlite") if r["kind"] == "charge"]
        weights = torch.nn.utils.parameters_to_vector(module.parameters()).tolist()
        made.append((weights, callback.epsilon, [row["charge"] for row in rows], charged(tmp_path / name)))
    assert made[0] == made[1]


def in_turns(subsets, count, rate, steps, first=0, epochs=1):
    """Samples as a training draws them, as rows of coins ``(steps · epochs, n)``."""
    data = make_data()
    data.setup("fit")
    made = PoissonTraining(data.private, 1 / 3, lambda: SeededNoise(3))
    done = [first]
    made.draw_in_turns(subsets, count, rate, lambda: done[0])
    made.batches.steps = steps
    found = []
    for _ in range(epochs):
        for places in made.batches:
            assert places.step == done[0] + len(found) % steps
            assert places == sorted(set(places))
            found.append(torch.zeros(PRIVATE).index_fill(0, torch.tensor(places, dtype=torch.int64), 1))
        done[0] += steps
    return torch.stack(found)


def test_each_step_draws_from_its_own_subset_alone_and_at_the_rate_of_a_cycle():
    subsets = BandedNoise(3).subsets(PRIVATE, SeededNoise(8))
    # Epochs of 400 steps, which are no whole cycles: the second one goes on where the first one ended.
    drawn = in_turns(subsets, 3, 0.4, 400, first=6, epochs=2)
    turns = (torch.arange(len(drawn)) + 6) % 3
    assert not drawn[turns[:, None] != subsets].any()
    for one in range(3):
        mine = drawn[turns == one][:, subsets == one]
        # One of the 90 frequencies is further off than 5 deviations with less than one seed in 10,000.
        assert bool(((mine.mean(dim=0) - 0.4).abs() < 5 * (0.24 / len(mine)) ** 0.5).all())
        both = (mine[:, 0] * mine[:, 1]).mean()
        assert float(both) == pytest.approx(0.16, abs=5 * (0.16 * 0.84 / len(mine)) ** 0.5)
    # No record is in two steps of any three that follow each other.
    assert float((drawn[:-2] + drawn[1:-1] + drawn[2:]).max()) == 1.0


def test_a_record_s_subset_hangs_on_no_other_record():
    banded, count = BandedNoise(4), 4000
    one, other = (banded.subsets(count, SeededNoise(seed)) for seed in (0, 1))
    # 4,000 coins of 1/4: 5 deviations are 137; of less than one seed in 10,000 for these 22 figures.
    for value in range(4):
        assert abs(int((one == value).sum()) - 1000) < 137
    for distance in (0, 1, 2, 4, 8, 90):
        # Neither the row nor any other record says where a record is.
        same = (one == other) if distance == 0 else (one[distance:] == one[:-distance])
        assert abs(float(same.float().mean()) - 0.25) < 5 * (0.1875 / len(same)) ** 0.5
        row = (one + distance) % 4 == torch.arange(count) % 4
        assert abs(float(row.float().mean()) - 0.25) < 5 * (0.1875 / count) ** 0.5
    # The others stay where they are when a record is added.
    assert torch.equal(banded.subsets(count + 1, SeededNoise(0))[:count], one)


class Drawn(pl.Callback):
    """Each batch that training gets is of the subset whose turn it is."""

    def __init__(self, training):
        self.session, self.count = training.session, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        turns = self.session.private.batches.turns
        assert bool((turns.subsets[batch.records._places] == self.session.next_step % turns.count).all())
        self.count += len(batch.records)


def test_a_training_draws_each_subset_in_its_turn_through_epochs_and_power_cuts(tmp_path, monkeypatch):
    seen = []

    def watched():
        callback = training(correlated_noise=BandedNoise(2), steps_per_charge=3, noise_multiplier=2.0)
        check = callback.session.check_turn

        def check_turn(step):
            subsets = callback.session.private.batches.turns.subsets
            kept = callback.session.run.steps._before
            seen.append((step, callback.session.next_step, len(kept), subsets))
            check(step)

        callback.session.check_turn = check_turn
        return callback

    drawn = power_cut_at(6, monkeypatch)
    with pytest.raises(OSError, match="power cut"):
        fit(Lit(), tmp_path, watched(), 5, callbacks=[keep_last(tmp_path)])
    # Two rows of two cycles each are paid; the sixth step, and the rest of its row, are lost.
    assert charged(tmp_path) == [(Gaussian(2.0, 1.0, 2 / 3), 4)]
    assert [one[:2] for one in seen] == [(step, step) for step in range(6)]
    last = tmp_path / "ckpt" / "last.ckpt"
    kept = torch.load(last, weights_only=True)["private_training"]
    assert {type(value) for value in kept.values()} <= {str, int}
    first, seen[:] = seen[0][3], []
    callback = watched()
    turns = Drawn(callback)
    _, trainer = fit(Lit(), tmp_path, callback, 5, callbacks=[keep_last(tmp_path), turns], ckpt_path=last)
    # 210 are expected of seven batches; of a binomial deviation below 15.
    assert 135 < turns.count < 285
    # The training begins with a cycle of its own, and correlates nothing with the steps before.
    assert [one[:2] for one in seen] == [(step, step) for step in range(8, 15)]
    assert [one[2] for one in seen] == [0, 1, 1, 1, 1, 1, 1]
    assert len(first) == len(seen[0][3]) == PRIVATE
    assert len(drawn) == 6 + 7
    assert trainer.global_step == 3 + 7
    assert charged(tmp_path) == [(Gaussian(2.0, 1.0, 2 / 3), 8)]
    assert callback.privacy_summary()["steps"] == 15
    plan = account([Charge(Gaussian(2.0, 1.0, 2 / 3), 8)], delta=1e-5).epsilon
    assert callback.epsilon == callback.epsilon_spent == pytest.approx(plan)


def test_workers_hand_on_the_step_of_a_batch_and_one_that_was_passed_over_is_refused(tmp_path):
    data = make_data(num_workers=1)
    callback = training(correlated_noise=BandedNoise(3))
    fit(Lit(), tmp_path, callback, 2, data)
    assert callback.privacy_summary()["steps"] == 6
    callback = training(correlated_noise=BandedNoise(3), noise_source=NoNoise())
    for step in (None, 1):
        with pytest.raises(RuntimeError, match="a Poisson batch was passed over"):
            callback.session.check_turn(step)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: BandedNoise(0), "bands=0"),
        (lambda: training(correlated_noise=BandedNoise(4)), "bands=4: each of so many subsets .* at most 3"),
        (
            lambda: training(
                correlated_noise=BandedNoise(2), groups=PrivacyGroups(torch.arange(2), (1.0, 2.0), (0.5, 0.5))
            ),
            "correlated_noise: .* leave out groups$",
        ),
        (
            lambda: training(correlated_noise=BandedNoise(2), adaptive_clipping=AdaptiveClipping()),
            "correlated_noise: .* leave out adaptive_clipping$",
        ),
    ],
)
def test_what_it_is_not_stated_for_is_named(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_shares_of_the_records_are_refused_before_a_charge(tmp_path, monkeypatch):
    monkeypatch.setattr("pl_privknn.training.session.Processes.__init__", two_processes)
    callback = training(correlated_noise=BandedNoise(2), noise_source=NoNoise())
    with pytest.raises(
        ValueError, match="correlated_noise: subsets are of all private records in one process"
    ):
        fit(Lit(), tmp_path, callback)
    assert not list(tmp_path.rglob("*.sqlite"))


def two_processes(self, trainer):
    self.rank, self.count = 0, 2


def test_a_training_goes_on_with_its_own_bands_alone(tmp_path):
    fit(Lit(), tmp_path, training(correlated_noise=BandedNoise(2)), callbacks=[keep_last(tmp_path)])
    for chosen in (BandedNoise(3), None):
        again = training(correlated_noise=chosen)
        with pytest.raises(ValueError, match="correlated_noise="):
            fit(Lit(), tmp_path, again, 2, ckpt_path=tmp_path / "ckpt" / "last.ckpt")
