"""Faults in curves, distributions, conversions and compositions."""

from __future__ import annotations

from .fault import Fault

FAULTS = (
    Fault(
        "below-rounded-up",
        "The lower bound on ε rounds losses up, and lies above the truth.",
        "pl_privknn.privacy.accounting.pld",
        {
            "indices = np.floor(self.losses[finite] / discretization).astype(np.int64)\n        low = int(indices.min())": "indices = np.ceil(self.losses[finite] / discretization).astype(np.int64)\n        low = int(indices.min())",
        },
        ("test_from_below::test_laplace_in_closed_form",),
    ),
    Fault(
        "below-takes-dominating-rows",
        "The lower bound on ε counts arg-max pairs that no record brings about.",
        "pl_privknn.privacy.accounting.from_below",
        {
            "present = (1 - mechanism.sampling_rate) * absent + mechanism.sampling_rate * present": "present = present + 0.0",
        },
        ("test_from_below::test_members_of_the_argmax_family_are_real",),
    ),
    Fault(
        "conversion-loses-delta",
        "The conversion of Rényi DP states an ε that is too small.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "- (math.log(delta) + np.log(orders)) / (orders - 1)\n    return max": "- (math.log(delta) + 2 * np.log(orders)) / (orders - 1)\n    return max",
        },
        ("test_accountant::test_reference_values[figure5 poisson gaussian]",),
    ),
    Fault(
        "conversion-sign",
        "The term of the orders is added instead of subtracted.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "candidates = curve + np.log1p(-1 / orders) - (math.log(delta)": "candidates = curve - np.log1p(1 / orders) - (math.log(delta)",
        },
        ("test_accountant::test_reference_values[figure5 plain gaussian]",),
    ),
    Fault(
        "conversion-divides-by-order",
        "ε(α) + log(1/δ)/α instead of /(α−1).",
        "pl_privknn.privacy.accounting.rdp",
        {
            "curve[use] - math.log(delta) / (orders[use] - 1)": "curve[use] - math.log(delta) / orders[use]",
        },
        ("test_accountant::test_reference_values[figure5 plain gaussian]",),
    ),
    Fault(
        "zero-epsilon-too-early",
        "ε = 0 is stated for releases that tell something.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "-np.expm1(-curve) <= delta * delta": "-np.expm1(-curve) <= delta",
        },
        ("test_accountant::test_every_total_of_a_gaussian_is_valid_from_tiny_to_huge",),
    ),
    Fault(
        "gaussian-rdp-factor",
        "The Gaussian's Rényi DP is halved.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "        return orders * mu * mu / 2": "        return orders * mu * mu / 4",
        },
        ("test_accountant::test_reference_values[figure5 plain gaussian]",),
    ),
    Fault(
        "sampled-gaussian-rdp-order",
        "The sampled Gaussian is divided by α instead of α−1.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "curve = log_a / (orders - 1)": "curve = log_a / orders",
        },
        ("test_mechanisms::test_sampled_gaussian_rdp_equals_dp_accounting_at_whole_orders[17.7-0.2]",),
    ),
    Fault(
        "sampling-squared",
        "Poisson sampling amplifies by γ² instead of γ.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "np.log1p(sampling_rate * np.expm1(np.minimum(losses, 1.0)))": "np.log1p(sampling_rate**2 * np.expm1(np.minimum(losses, 1.0)))",
        },
        ("test_mechanisms::test_sampled_gaussian_rdp_equals_dp_accounting_at_whole_orders[1.1-0.0043]",),
    ),
    Fault(
        "best-pair-of-a-family",
        "The cheapest way in which the other records can lie is charged, instead of the dearest.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "large = np.max(sums": "large = np.min(sums",
            "np.max(_accurate(": "np.min(_accurate(",
        },
        ("test_mechanisms::test_screening_rdp_is_the_maximum_over_all_pairs[2-1.0]",),
    ),
    Fault(
        "one-direction-rdp",
        "Only the removal of a record is accounted, not its addition.",
        "pl_privknn.privacy.accounting.rdp",
        {
            "return np.maximum(remove, add) / ": "return remove / ",
        },
        ("test_mechanisms::test_the_curve_of_a_family_is_the_dearest_pair_in_the_dearer_direction",),
    ),
    Fault(
        "releases-counted-once",
        "A thousand releases cost as much Rényi DP as one.",
        "pl_privknn.privacy.accounting.accountant",
        {
            "total += charge.count * _curve(charge.mechanism, adjacency)": "total += _curve(charge.mechanism, adjacency)",
        },
        ("test_accountant::test_reference_values[figure5 plain gaussian]",),
    ),
    Fault(
        "pure-epsilon-counted-once",
        "A thousand releases have the pure ε of one.",
        "pl_privknn.privacy.accounting.accountant",
        {
            "sum(charge.count * charge.mechanism.pure_epsilon": "sum(charge.mechanism.pure_epsilon",
        },
        ("test_accountant::test_reference_values[argmax by gumbel noise, swapped votes]",),
    ),
    Fault(
        "gaussian-counts-dropped",
        "Gaussian releases compose as one.",
        "pl_privknn.privacy.accounting.accountant",
        {
            "squares += charge.count * mu * mu": "squares += mu * mu",
        },
        ("test_accountant::test_reference_values[gnmax mnist 286 answers sigma 40]",),
    ),
    Fault(
        "data-dependent-one-direction",
        "The data-dependent figure covers one of the two directions.",
        "pl_privknn.privacy.accounting.data_dependent",
        {
            'if directions == "both" else': 'if directions == "one" else',
        },
        (
            (
                "test_pate_analysis::test_bounds_lie_above_direct_integration_and_below_the_independent_curv"
                "e[gaussian-1.5-votes0]"
            ),
        ),
    ),
    Fault(
        "losses-rounded-down",
        "Privacy losses go to the lower grid point.",
        "pl_privknn.privacy.accounting.pld",
        {
            "np.bincount(indices - low + 1, upper * share, len(masses))": "np.bincount(indices - low, upper * share, len(masses))",
        },
        (
            (
                "test_mechanism_plds::test_a_pld_sums_to_one_and_dominates_at_any_grid[Laplace(scale=4.0, "
                "l1_sensitivity=1.0, sampling_rate=0.3)]"
            ),
        ),
    ),
    Fault(
        "gaussian-losses-rounded-down",
        "Losses of Gaussian releases go to the lower grid point.",
        "pl_privknn.privacy.accounting.pld",
        {
            "masses[start + 1 : start + 1 + len(right)] += right": "masses[start : start + len(right)] += right",
        },
        ("test_mechanism_plds::test_plds_equal_dp_accountings[ours2-<lambda>]",),
    ),
    Fault(
        "infinite-losses-forgotten",
        "Outcomes that give a record away for certain are left out.",
        "pl_privknn.privacy.accounting.pld",
        {
            "return low, masses, float(np.sum(self.upper[np.isposinf(self.losses)]))": "return low, masses, 0.0",
        },
        ("test_reverse_knn_shuffle::test_negative_binomial_costs_the_hockey_stick_of_its_cells",),
    ),
    Fault(
        "gaussian-mu",
        "δ of Gaussian DP with μ in the place of μ/2.",
        "pl_privknn.privacy.accounting.pld",
        {
            "first, second = float(log_ndtr(mu / 2 - epsilon / mu))": "first, second = float(log_ndtr(mu / 4 - epsilon / mu))",
        },
        ("test_accountant::test_reference_values[gnmax mnist 286 answers sigma 40]",),
    ),
    Fault(
        "one-direction-pld",
        "Composed distributions are read in the remove direction alone.",
        "pl_privknn.privacy.accounting.composition",
        {
            "return max(self.remove.epsilon(delta), self.add.epsilon(delta))": "return self.remove.epsilon(delta)",
        },
        (
            (
                "test_reverse_knn_shuffle::test_negative_binomial_costs_the_hockey_stick_of_its_cells[add_re"
                "move-3.0-0.5]"
            ),
        ),
    ),
    Fault(
        "composed-once",
        "Distributions are not composed with themselves.",
        "pl_privknn.privacy.accounting.composition",
        {
            "spectrum *= fft.rfft(folded) ** count": "spectrum *= fft.rfft(folded)",
        },
        ("test_accountant::test_pld_composition_equals_analytic_gaussian",),
    ),
    Fault(
        "composition-loses-infinity",
        "The chance of a certain loss vanishes in composition.",
        "pl_privknn.privacy.accounting.composition",
        {
            "infinity = -math.expm1(log_finite)": "infinity = 0.0",
        },
        ("test_reverse_knn_shuffle::test_negative_binomial_costs_the_hockey_stick_of_its_cells",),
    ),
    Fault(
        "composition-loses-its-tail",
        "What lies beyond the grid of a composition counts as nothing.",
        "pl_privknn.privacy.accounting.composition",
        {
            "missing = math.exp(min(0.0, float(np.min(upper_log_mgf - thetas * (bottom + length)))))": "missing = 0.0",
            "top = math.ceil(upper_reach(delta * 1e-10)[0])": "top = math.ceil(upper_reach(delta * 10)[0])",
            "    top = max(top, math.ceil(_reach(pieces, theta, log_scale, thetas, +1)))\n": "",
        },
        ("test_accountant::test_lumpy_losses_are_never_under_reported",),
    ),
    Fault(
        "exact-forgets-a-rest",
        "Releases that fill no whole block are left out of the exact figure.",
        "pl_privknn.privacy.accounting.exact",
        {
            "+ ([plan.rest] if plan.rest else [])": "",
        },
        ("test_exact::test_extreme_noise[2.0-1.0-5000]",),
    ),
    Fault(
        "exact-forgets-the-others",
        "The exact figure counts one kind of release alone.",
        "pl_privknn.privacy.accounting.exact",
        {
            "rest = [c for c in others if c is not family]": "rest = []",
        },
        ("test_exact::test_grows_with_the_count_and_with_company",),
    ),
    Fault(
        "exact-last-pair",
        "The adversary of the exact figure does not choose the pair that suits it best.",
        "pl_privknn.privacy.accounting.stencils",
        {
            "best[i] = max(best[i], gain[i])": "best[i] = gain[i]",
        },
        ("test_exact::test_induction_finds_the_best_of_all_adaptive_strategies",),
    ),
    Fault(
        "exact-leaves-out-the-best-pair",
        "Pairs are left out that are the best for some slope of the values.",
        "pl_privknn.privacy.accounting.contenders",
        {
            "slope = low if (difference > 0) == (d > reach) else high": "slope = high",
        },
        ("test_contenders::test_who_stays_holds_the_best_for_every_smooth_value",),
    ),
    Fault(
        "exact-takes-a-narrower-interval-for-a-wider",
        "Pairs that no other one dominates are left out.",
        "pl_privknn.privacy.accounting.contenders",
        {
            "before * (1 + _SAME)": "before * 1.001",
        },
        ("test_contenders::test_pairs_of_two_outcomes_that_stay_have_the_envelope_of_all[screening]",),
    ),
    Fault(
        "filter-forgets-its-conversion",
        "The Rényi filter admits more than the budget.",
        "pl_privknn.privacy.ledger.renyi_filter",
        {
            "- (math.log(delta) + math.log(order)) / (order - 1)": "- math.log(delta) / order",
        },
        ("test_ledger::test_filter_admits_exactly_what_its_closed_form_admits",),
    ),
    Fault(
        "filter-counts-once",
        "The Rényi filter counts a thousand releases as one.",
        "pl_privknn.privacy.ledger.renyi_filter",
        {
            "sum(charge.count * _rdp(": "sum(_rdp(",
        },
        ("test_ledger::test_filter_is_the_accountants_rdp_at_one_order",),
    ),
)
