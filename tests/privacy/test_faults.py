"""Faults put into objects through their public names, and the check that must notice each.

A fault here is one that would make an ε wrong or reveal a record: a mechanism that draws less noise than it
accounts, coins of another rate, a curve that is too low, a ledger that forgets. Each names the existing test function
that fails with it; without a fault these pass in their own files. Faults of labelers are in
``testing/test_check_labeler_faults.py``; for others there is ``make mutants``.
"""

import dataclasses
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats

from pl_privknn import neighbors
from pl_privknn.auditing import bounds
from pl_privknn.labelers import pate
from pl_privknn.neighbors import poisson, search
from pl_privknn.privacy import ledger, mechanisms, noise, store
from pl_privknn.privacy.accounting import accountant, pld, rdp, renyi_filter
from pl_privknn.privacy.mechanisms import base

TESTS = Path(__file__).parents[1]
CASE = json.loads((TESTS / "data" / "reference_epsilons.json").read_text(encoding="utf-8"))[0]


class Fault(NamedTuple):
    """What is patched, with what, and which check fails.

    Attributes:
        owner: class or module.
        name: of its function.
        faulty: makes the faulty function from the honest one.
        check: a test function, as ``file below tests::name``.
        given: arguments of that test function that are no fixtures.
    """

    owner: Any
    name: str
    faulty: Callable[..., Any]
    check: str
    given: dict[str, Any] = {}  # noqa: RUF012 - never written to


def result(change):
    """A function that gives something else than it should."""
    return lambda honest: lambda *args, **kwargs: change(honest(*args, **kwargs))


def argument(place, change):
    """A function that works with something else than it was given."""

    def faulty(honest):
        def called(*args, **kwargs):
            args = list(args)
            if place < len(args):
                args[place] = change(args[place])
            else:
                name = list(inspect.signature(honest).parameters)[place]
                kwargs[name] = change(kwargs[name])
            return honest(*args, **kwargs)

        return called

    return faulty


def instead(function):
    """Another function."""
    return lambda honest: function


def as_if(**changes):
    """A method of a dataclass that takes some of its fields for others."""

    def faulty(honest):
        def called(self, *args):
            changed = {name: change(getattr(self, name)) for name, change in changes.items()}
            return honest(dataclasses.replace(self, **changed), *args)

        return called

    return faulty


def halved(value):
    return value / 2


half = result(halved)
half_scale = argument(2, halved)
nothing = instead(lambda *args, **kwargs: None)
_NOISE = "privacy/test_noise.py"
_MECHANISMS, _PLDS = "privacy/mechanisms/test_mechanisms.py", "privacy/mechanisms/test_mechanism_plds.py"
_VOTES = "privacy/mechanisms/test_vote_noise.py"
_LOCAL = "privacy/mechanisms/test_local_mechanisms.py"
_ACCOUNTANT, _LEDGER = "privacy/accounting/test_accountant.py", "privacy/ledger/test_ledger.py"
_STORE, _GUARANTEE = "privacy/ledger/test_ledger_store.py", "privacy/accounting/test_guarantee.py"
_SCALE = f"{_PLDS}::test_drawn_noise_has_the_accounted_scale_and_leaves_the_values_alone"
_STREAMS = f"{_NOISE}::test_stream_depends_on_seed_and_key_alone"
_LITERAL = "neighbors/test_poisson_neighbors.py::test_votes_have_the_distribution_of_literal_sampling"
_SAMPLED = {"n": 30, "k": 4, "rate": 0.5, "length": None, "classes": 2}
_REFERENCE = f"{_ACCOUNTANT}::test_reference_values"


def _law(draw, law):
    given = {"draw": draw, "law": law, "source": noise.SeededNoise(11)}
    return {"check": f"{_NOISE}::test_continuous_noise_has_its_distribution", "given": given}


def _in_place(honest):
    def add_noise(self, values, source):
        return values.copy_(honest(self, values, source))

    return add_noise


def _one_sample(honest):
    def toss(coins, shape, rate):
        return honest(coins, (1, *shape[1:]), rate).expand(shape)

    return toss


_twice = result(lambda votes: 2 * votes)


FAULTS = {
    # ---- noise that is drawn
    "half the normal noise": Fault(noise.NoiseSource, "normal", half, _SCALE),
    "half the Laplace noise": Fault(noise.NoiseSource, "laplace", half, _SCALE),
    "uniform numbers of 8 bits": Fault(noise.NoiseSource, "uniform",
        result(lambda drawn: (drawn * 256).floor() / 256),
        **_law(lambda source: source.uniform(200_000), stats.uniform())),
    "half the noise on multiples": Fault(noise.NoiseSource, "rounded_normal", half_scale,
        "privacy/test_exact_noise.py::test_noise_on_multiples_is_that_of_the_mechanism", {"step": 1.0}),
    "half the Laplace noise on votes": Fault(noise.NoiseSource, "rounded_laplace", half_scale,
        "privacy/test_exact_noise.py::test_masses_are_those_of_the_closed_form",
        {"kind": "laplace", "sigma": 7.5, "source": noise.SeededNoise(3)}),
    "choices by half the scale": Fault(noise.NoiseSource, "exponential_choice", half_scale,
        f"{_PLDS}::test_argmax_draws_the_softmax"),
    "coins that show heads too often": Fault(noise.NoiseSource, "bernoulli", argument(2, lambda p: p + 0.01),
        f"{_NOISE}::test_share_of_true_coins", {"p": 0.15}),
    "one stream for all releases": Fault(noise.SeededNoise, "stream",
        instead(lambda self, *key: noise.SeededNoise(self.seed)), _STREAMS),
    "streams that forget the number of the release": Fault(noise.SeededNoise, "stream",
        lambda honest: lambda self, *key: honest(self, key[0]), _STREAMS),
    "the system's noise from a generator that a fork copies": Fault(noise.SystemNoise, "random_words",
        instead(lambda self, count: np.random.randint(0, 2**63, count).astype(np.uint64)),  # noqa: NPY002
        f"{_NOISE}::test_system_noise_differs_after_fork_and_between_processes"),
    "a default source with a seed": Fault(noise, "default_noise", instead(lambda: noise.SeededNoise(0)),
        f"{_NOISE}::test_default_is_the_cryptographic_source"),
    # ---- mechanisms that draw otherwise than they account
    "a Gaussian mechanism with half its noise": Fault(mechanisms.Gaussian, "add_noise", half, _SCALE),
    "a Laplace mechanism without noise": Fault(mechanisms.Laplace, "add_noise",
        instead(lambda self, values, source: values.double()), _SCALE),
    "noise that overwrites what it is added to": Fault(mechanisms.Gaussian, "add_noise", _in_place, _SCALE),
    "a screening with half its noise": Fault(mechanisms.NoisyScreening, "passes", as_if(sigma=halved),
        f"{_PLDS}::test_screening_passes_with_the_accounted_probability"),
    "an argmax with half its noise": Fault(mechanisms.ExponentialArgmax, "argmax", as_if(scale=halved),
        f"{_PLDS}::test_argmax_draws_the_softmax"),
    "randomised response that lies too seldom": Fault(mechanisms.RandomizedResponse, "randomize",
        as_if(flip_probability=halved),
        f"{_LOCAL}::test_randomized_values_have_the_accounted_frequencies", {"values": 4}),
    "a winner that is chosen without noise": Fault(mechanisms.Gaussian, "argmax",
        instead(lambda self, votes, source: votes.argmax(dim=1)),
        f"{_VOTES}::test_additive_noise_chooses_the_largest_noisy_count_and_states_its_deviation",
        {"noise": mechanisms.Gaussian(4.0, 1.0)}),
    # ---- costs that are too low
    "half the Rényi divergence of a Gaussian release": Fault(mechanisms.Gaussian, "rdp", half,
        f"{_MECHANISMS}::test_gaussian_rdp_is_the_closed_form"),
    "amplification by the square of the sampling rate": Fault(rdp, "gaussian_rdp",
        argument(1, lambda rate: rate**2),
        f"{_MECHANISMS}::test_sampled_gaussian_rdp_equals_dp_accounting_at_whole_orders",
        {"sigma": 1.1, "rate": 0.0043}),
    "half the Rényi divergence of a Laplace release": Fault(mechanisms.Laplace, "rdp", half,
        f"{_MECHANISMS}::test_laplace_rdp_equals_dp_accounting", {"eps": 1.0}),
    "a screening accounted at its first vote count": Fault(mechanisms.NoisyScreening, "log_dominating_pairs",
        result(lambda pairs: (pairs[0][:1], pairs[1][:1])),
        f"{_MECHANISMS}::test_screening_rdp_is_the_maximum_over_all_pairs", {"k": 30, "rate": 1.0}),
    "a swapped vote accounted as an added one": Fault(mechanisms.ExponentialArgmax, "rdp",
        as_if(votes=lambda votes: "add"), f"{_MECHANISMS}::test_argmax_rdp_bounds_every_vote_vector_closely",
        {"votes": "swap", "rate": 1.0, "scale": 0.7}),
    "shuffling among twice as many clients": Fault(mechanisms.ShuffleAmplification, "pld",
        as_if(num_clients=lambda count: 2 * count), f"{_LOCAL}::test_shuffling_equals_enumeration_of_the_clones"),
    "a conversion to ε that is a tenth too low": Fault(rdp, "epsilon_improved",
        result(lambda epsilon: 0.9 * epsilon), _REFERENCE, {"case": CASE}),
    "a composition of half as many releases": Fault(pld, "compose",
        argument(0, lambda parts: [(one, max(1, count // 2)) for one, count in parts]),
        f"{_ACCOUNTANT}::test_pld_composition_equals_analytic_gaussian",
        {"sigma": 50.0, "count": 5000, "delta": 1e-5}),
    "an ε a little below what was composed": Fault(pld.Direction, "epsilon",
        result(lambda epsilon: 0.999 * epsilon), f"{_ACCOUNTANT}::test_pld_composition_equals_analytic_gaussian",
        {"sigma": 50.0, "count": 5000, "delta": 1e-5}),
    "equal charges of which one counts": Fault(accountant, "merged",
        lambda honest: lambda charges: honest({charge.mechanism: charge for charge in charges}.values()),
        f"{_ACCOUNTANT}::test_equal_charges_are_merged"),
    "a pure ε that is too low": Fault(mechanisms.Laplace, "pure_epsilon", half,
        f"{_ACCOUNTANT}::test_laplace_reaches_its_pure_epsilon_as_delta_vanishes", {"count": 5}),
    "an attacker who is told to find less": Fault(accountant.TradeOff, "true_positive_rate",
        result(lambda rates: 0.99 * rates),
        "privacy/accounting/test_tradeoff.py::test_several_coins_against_every_transcript"),
    # ---- guarantees that get stronger
    "guarantees of which the first counts": Fault(base.Guarantee, "__and__", instead(lambda self, other: self),
        f"{_GUARANTEE}::test_guarantees_compose_to_the_weakest_with_all_reasons"),
    "noise from a seed that passes for protection": Fault(noise.SeededNoise, "cryptographic", lambda honest: True,
        f"{_GUARANTEE}::test_plans_say_what_their_noise_leaves_of_them"),
    "a data-dependent cost without its condition": Fault(pate, "REASON", lambda honest: "the weather",
        "labelers/pate/test_pate_report.py::test_data_dependent_report_is_conditional_and_below_the_independent_figure"),
    "a condition that its charge forgets": Fault(base.Charge, "guarantee",
        lambda honest: property(lambda self: base.Guarantee()),
        f"{_LEDGER}::test_conditions_of_mechanisms_are_carried"),
    "a record without its count": Fault(base.Charge, "to_record",
        result(lambda record: {name: value for name, value in record.items() if name != "count"}),
        f"{_MECHANISMS}::test_a_record_round_trips", {"mechanism": mechanisms.Gaussian(3.0)}),
    # ---- ledgers
    "a ledger that forgets": Fault(store.RowStore, "append", instead(lambda self, body: 3),
        f"{_LEDGER}::test_a_charge_is_on_disk_when_it_returns"),
    "a budget that refuses nothing": Fault(ledger, "check_budget", nothing,
        f"{_LEDGER}::test_budget_refuses_plans_and_charges_before_anything_is_written"),
    "a report that counts each mechanism once": Fault(store.Balance, "spent",
        result(lambda charges: [dataclasses.replace(charge, count=1) for charge in charges]),
        f"{_LEDGER}::test_plan_is_the_guarantee_and_charges_are_what_was_spent"),
    "one run's budget paid by another's plan": Fault(store.Balance, "guarantee",
        result(lambda charges: charges[:0]), f"{_LEDGER}::test_runs_compose_and_each_can_be_seen_alone"),
    "another plan for a run that is under way": Fault(ledger, "beyond", instead(lambda wanted, granted: []),
        f"{_LEDGER}::test_same_plan_continues_and_another_is_refused"),
    "a filter that counts half": Fault(renyi_filter.RenyiFilter, "epsilon", half,
        f"{_LEDGER}::test_filter_is_the_accountants_rdp_at_one_order"),
    "parameters that were chosen late and pass for early ones": Fault(store.Balance, "late",
        lambda honest: property(lambda self: []),
        f"{_LEDGER}::test_parameters_chosen_after_a_release_make_the_figure_conditional"),
    "rows that are sealed one by one": Fault(store, "seal", lambda honest: lambda previous, body: honest("", body),
        f"{_STORE}::test_rows_hold_what_is_documented_and_the_chain_is_sha256"),
    "rows that nobody verifies": Fault(store, "seal",
        lambda honest: lambda previous, body: honest(previous, body[:20]),
        f"{_STORE}::test_every_change_is_found_and_nothing_is_repaired", {"name": "count"}),
    # ---- audits
    "a bound without its confidence": Fault(bounds, "lower_probability",
        instead(lambda hits, trials, error: np.asarray(hits) / trials),
        "auditing/test_bounds.py::test_a_true_mu_is_passed_no_more_often_than_stated"),
    # ---- neighbours
    "samples at a higher rate": Fault(poisson, "toss", argument(2, lambda rate: rate + 0.04), _LITERAL, _SAMPLED),
    "one sample for all queries": Fault(poisson, "toss", _one_sample, _LITERAL, _SAMPLED),
    "every record in every sample": Fault(poisson, "toss", argument(2, lambda rate: 1.0), _LITERAL, _SAMPLED),
    "records that vote twice": Fault(poisson, "count_votes", _twice,
        "neighbors/test_poisson_neighbors.py::test_a_record_votes_at_most_once_and_the_nearest_first",
        {"length": None}),
    "neighbours in the order of half precision": Fault(search, "pair_distances",
        result(lambda distances: distances.astype(np.float16).astype(np.float64)),
        "neighbors/test_neighbors.py::test_order_is_that_of_float64_distances", {"kind": "close"}),
    "records assigned to a query that is not the nearest": Fault(neighbors, "assign",
        result(lambda chosen: chosen.flip(0)), "neighbors/test_assignment.py::test_equals_all_distances_in_float64",
        {"k": 2, "d": 3, "offset": 0.0, "scale": 1.0}),
}  # fmt: skip


def forget():
    """Empty every cache of the package: what was computed with a fault serves nobody else, and conversely."""
    for module in [module for name, module in sys.modules.items() if name.startswith("pl_privknn.")]:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def run(check, given, fixtures):
    """Call a test; its file is executed anew, so that it sees the fault under every name."""
    path, _, name = check.partition("::")
    spec = importlib.util.spec_from_file_location("faulted", TESTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    test = getattr(module, name)
    given = {key: getattr(module, value) if key == "bound" else value for key, value in given.items()}
    wanted = inspect.signature(test).parameters
    test(**given, **{key: value for key, value in fixtures.items() if key in wanted})


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name, monkeypatch, tmp_path):
    fault = FAULTS[name]
    fixtures = {"path": tmp_path / "ledger.sqlite", "tmp_path": tmp_path}
    honest = inspect.getattr_static(fault.owner, fault.name, None)
    forget()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(fault.owner, fault.name, fault.faulty(honest))
            with pytest.raises((AssertionError, pytest.fail.Exception)):
                run(fault.check, fault.given, fixtures)
    finally:
        forget()
