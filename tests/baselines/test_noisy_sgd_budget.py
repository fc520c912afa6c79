"""The guarantee of noisy SGD: its ε, noise for a target, budgets and shared ledgers."""

import json
import math

import pytest
import pytorch_lightning as pl
from noisy_sgd_setup import PRIVATE, NoNoise, charged, fit, make

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.ledger import BudgetExceeded
from pl_privknn.privacy.mechanisms import Charge
from pl_privknn.privacy.noisy_steps import (
    noise_aware_lr,
    noise_for_steps,
    step_mechanism,
)


@pytest.mark.parametrize(
    ("multiplier", "rate", "steps"), [(1.1, 0.02, 500), (5.43, 0.1, 200), (0.8, 0.005, 1000)]
)
def test_epsilon_agrees_with_opacus(multiplier, rate, steps):
    from opacus.accountants import PRVAccountant, RDPAccountant

    ours = account([Charge(step_mechanism(multiplier, 0.3, rate), steps)], delta=1e-5)
    by_rdp, by_prv = RDPAccountant(), PRVAccountant()
    by_rdp.history = by_prv.history = [(multiplier, rate, steps)]
    # Opacus tries fewer orders, so its RDP figure may be a little above ours and never below by more than rounding.
    rdp = by_rdp.get_epsilon(1e-5)
    # The two look at different orders: ours lie 3 % apart, Opacus has whole ones and some between.
    assert ours.epsilon_rdp <= rdp * (1 + 2e-3)
    assert ours.epsilon_rdp == pytest.approx(rdp, rel=0.01)
    # PRV's figure is an upper bound with an error of at most eps_error.
    prv = by_prv.get_epsilon(1e-5, eps_error=0.01)
    assert prv - 0.02 <= ours.epsilon <= prv + 0.005


def test_noise_is_found_for_a_target(tmp_path):
    module = make(epsilon=2.0)
    fit(module, tmp_path)
    assert 1.98 < module.epsilon <= 2.0
    summary = module.privacy_summary()
    assert summary["noise_multiplier"] == noise_for_steps(2.0, 1e-5, 30 / PRIVATE, 6)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["steps"], summary["steps_planned"], summary["adjacency"]) == (6, 6, "add_remove")


def test_budget_is_checked_before_anything_is_drawn(tmp_path):
    with pytest.raises(BudgetExceeded):
        fit(make(max_epsilon=0.5, noise_source=NoNoise()), tmp_path)
    assert charged(tmp_path) == []
    # With other parameters the same folder serves.
    fit(make(max_epsilon=0.5, epsilon=0.5), tmp_path)


def test_training_stops_cleanly_where_the_budget_ends(tmp_path):
    probe = step_mechanism(1.0, 1.0, 30 / PRIVATE)
    budget = account([Charge(probe, 5)], delta=1e-5).epsilon * 1.001
    module = make(max_epsilon=budget, on_budget="stop")
    trainer = fit(module, tmp_path, epochs=4)
    assert module.planned_steps == trainer.global_step == sum(count for _, count in charged(tmp_path)) == 5
    assert module.epsilon <= budget < account([Charge(probe, 6)], delta=1e-5).epsilon
    with pytest.raises(BudgetExceeded):  # not even one step fits
        fit(make(max_epsilon=1e-3, on_budget="stop", noise_source=NoNoise()), tmp_path / "other")


def test_two_trainings_share_one_ledger(tmp_path):
    ledger = tmp_path / "shared.sqlite"
    first = make(ledger_path=ledger)
    fit(first, tmp_path / "a")
    alone = first.epsilon
    second = make(ledger_path=ledger)
    fit(second, tmp_path / "b")
    both = account([Charge(step_mechanism(1.0, 1.0, 30 / PRIVATE), 12)], delta=1e-5).epsilon
    assert alone < second.epsilon == pytest.approx(both)


def test_learning_rate_is_lowered_by_public_noise_alone(tmp_path):
    assert noise_aware_lr(8.0, None, 1e9, 100, 1) == 8.0
    assert noise_aware_lr(8.0, 0.1, 0.5, 100, 1000) == 8.0
    assert noise_aware_lr(8.0, 0.1, 20.0, 100, 1000) == pytest.approx(4.0)
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(make(lr=2.0, noise_limit=0.01, scheduler="linear"), tmp_path, callbacks=[Rates()])
    peak = 2.0 * 0.01 / (1.0 * math.sqrt(6) / 30)
    assert rates == pytest.approx([peak * left / 6 for left in range(6, 0, -1)])
