"""Groups of records with an ε of their own: their rates, their coins, what ledger and summary say of them."""

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.record_groups import group_costs, poisson_sample_by_group
from pl_privknn.privacy.store import read_rows
from pl_privknn.privacy.verification import check_summary
from pl_privknn.training import PrivacyGroups
from tests.setup.refusals import refusals
from tests.training.noisy_sgd_setup import PRIVATE, keep_last, make_data, power_cut_at, with_private
from tests.training.training_setup import Lit, Silent, fit, literal_update, training, weights

HALVES = torch.arange(PRIVATE) % 2
EACH = (1.0, 4.0), (0.5, 0.5)


def test_each_group_costs_what_dp_accounting_says_and_no_more_than_was_asked():
    noise, steps = 1.5, 40
    groups = PrivacyGroups(HALVES, (0.3, 4.0), (0.2, 0.8))
    rates = groups.rates(noise, 1e-5, steps)
    assert rates == sorted(rates)
    charged = Charge(Gaussian(noise, 1.0, max(rates)), steps)
    costs = group_costs(rates, charged, [charged], 1e-5, exact=False)
    for asked, rate, cost in zip(groups.epsilons, rates, costs, strict=True):
        accountant = PLDAccountant()
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
        assert cost == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3, abs=2e-3)
        assert cost <= asked
        assert cost > 0.99 * asked or rate == 1.0


def test_what_is_beside_the_steps_counts_in_full_for_every_group():
    step, other = Gaussian(2.0, 1.0, 0.2), Charge(Gaussian(20.0), 3)
    # Two runs took the same steps, and only one of them has groups.
    found = group_costs([0.05, 0.2], Charge(step, 10), [Charge(step, 25), other], 1e-5, exact=False)
    lower = [Charge(Gaussian(2.0, 1.0, 0.05), 10), Charge(step, 15), other]
    assert found[0] == pytest.approx(account(lower, delta=1e-5, exact=False).epsilon)
    assert found[1] == pytest.approx(account([Charge(step, 25), other], delta=1e-5, exact=False).epsilon)


def test_noise_makes_batches_of_about_the_expected_size():
    groups = PrivacyGroups(HALVES, (0.5, 2.0), (0.3, 0.7))
    noise = groups.noise_for(0.2, 1e-5, 5)
    low, high = groups.rates(noise, 1e-5, 5)
    assert 0.3 * low + 0.7 * high == pytest.approx(0.2, rel=0.015)


def test_a_record_is_drawn_with_the_rate_of_its_group_and_alone():
    members = (torch.arange(PRIVATE) >= 30).long()
    coins, draws = SeededNoise(3), 800
    counts, both = torch.zeros(PRIVATE), 0
    for draw in range(draws):
        places = poisson_sample_by_group(members, [0.05, 0.6], coins.stream("draw", draw)).tolist()
        assert places == sorted(set(places))
        counts[places] += 1
        both += {0, PRIVATE - 1} <= set(places)
    # One of the frequencies is further from its rate than 5 deviations with less than one seed in 1,000.
    rates = torch.tensor([0.05, 0.6])[members]
    assert bool(((counts / draws - rates).abs() < 5 * (rates * (1 - rates) / draws).sqrt()).all())
    assert both / draws == pytest.approx(0.03, abs=5 * (0.03 * 0.97 / draws) ** 0.5)


def test_the_ledger_promises_the_largest_and_the_summary_states_each(tmp_path):
    groups = PrivacyGroups(HALVES, *EACH)
    callback, _ = fit(Lit(), tmp_path, training(noise_multiplier=2.0, groups=groups), epochs=2)
    summary = callback.privacy_summary()
    low, high = summary["epsilon_of_groups"]
    assert 0.98 < low <= 1.0 < 3.9 < high <= 4.0
    assert callback.epsilon == pytest.approx(high, rel=2e-3)
    assert summary["epsilon"] == pytest.approx(high)
    assert summary["sampling_rate"] == max(summary["rate_of_groups"])
    (row,) = [one for one in read_rows(tmp_path / "ledger.sqlite") if one["kind"] == "plan"]
    assert row["description"]["epsilon_of_groups"] == pytest.approx([low, high])
    assert row["description"]["rates"] == summary["rate_of_groups"]
    ledger = tmp_path / "ledger.sqlite"
    assert all(check["agrees"] for check in check_summary(summary, ledger))
    forged = {**summary, "epsilon_of_groups": [low / 2, high]}
    assert [c["name"] for c in check_summary(forged, ledger) if not c["agrees"]] == ["epsilon_of_groups"]


def test_members_are_those_of_the_rows(tmp_path):
    # So much of ε that everybody of group 1 takes part, and so little that nobody of group 0 does.
    chosen = torch.nonzero(HALVES).flatten().tolist()
    expected = literal_update(Lit(), make_data(), 0.1, 60, chosen=chosen)
    module = Lit()
    groups = PrivacyGroups(HALVES, (1e-4, 1e4), (0.5, 0.5))
    callback = training(
        max_grad_norm=0.1, expected_batch_size=60, private_records=60, noise_multiplier=1.0, groups=groups,
        noise_source=Silent(0),
    )  # fmt: skip
    fit(module, tmp_path, callback, epochs=1)
    assert callback.privacy_summary()["rate_of_groups"][1] == 1.0
    torch.testing.assert_close(weights(module).double(), expected, rtol=1e-4, atol=1e-6)


test_groups_that_do_not_fit_are_refused = refusals(
    {
        "epsilon=2.0: groups have": lambda: training(epsilon=2.0, groups=PrivacyGroups(HALVES, *EACH)),
        "shares=.* sum to 0.9": lambda: PrivacyGroups(HALVES, (1.0, 4.0), (0.5, 0.4)),
        "members: must be groups from 0 to 1": lambda: PrivacyGroups(HALVES + 1, *EACH),
    }
)


def test_members_of_other_records_are_refused_before_a_charge(tmp_path):
    with pytest.raises(ValueError, match="members: must be one group a private record") as refused:
        fit(Lit(), tmp_path, training(noise_multiplier=2.0, groups=PrivacyGroups(HALVES[:-1], *EACH)))
    assert str(PRIVATE) not in str(refused.value)
    assert not (tmp_path / "ledger.sqlite").exists()


def test_a_training_goes_on_with_its_members_alone(tmp_path, monkeypatch):
    """A record that changes its group is drawn at two rates, and no group's ε covers it."""
    power_cut_at(4, monkeypatch)

    def go_on(members, folder=tmp_path, order=None):
        data = make_data() if order is None else with_private(make_data(), order)
        last = folder / "ckpt" / "last.ckpt"
        callback = training(noise_multiplier=2.0, groups=PrivacyGroups(members, *EACH), steps_per_charge=1)
        resume = {"ckpt_path": last if last.exists() else None, "callbacks": [keep_last(folder)]}
        return fit(Lit(), folder, callback, 2, data, **resume)

    with pytest.raises(OSError, match="power cut"):
        go_on(HALVES)
    charged = len(read_rows(tmp_path / "ledger.sqlite"))
    (noted,) = tmp_path.with_name(f"{tmp_path.name}.private").rglob("private.sqlite")
    assert noted.stat().st_mode & 0o77 == 0
    order = torch.arange(PRIVATE).roll(1)
    for members, rows in ((1 - HALVES, None), (HALVES, order)):
        with pytest.raises(ValueError, match="groups: private records or their members are not those"):
            go_on(members, order=rows)
    content = noted.read_bytes()
    noted.unlink()
    with pytest.raises(FileNotFoundError, match=r"groups: .*private.sqlite is missing"):
        go_on(HALVES)
    noted.write_bytes(content)
    assert len(read_rows(tmp_path / "ledger.sqlite")) == charged
    # Another order of the same records is no other training where each keeps its group.
    callback, _ = go_on(HALVES[order], order=order)
    assert callback.privacy_summary()["steps"] == 6
