"""Words of docs/methods/ind_knn.md hold in the stored results."""

from benchmarks.record import entries, results


def methods_by_case():
    """Stored rows by method, of each features, number of queries and ε."""
    found = {}
    for features, entry in entries("ind_knn_accuracy").items():
        for row in entry["results"]["rows"]:
            if row["accounting"] in ("gdp", "smaller of rdp and pld"):
                case = features, row["queries"], row["epsilon"]
                found.setdefault(case, {})[row["method"]] = row
    return found


def test_claims_of_the_page_hold_in_the_results():
    """Density above Private-kNN, Gaussian DP above RDP, and the speed."""
    rows = methods_by_case()
    assert len(rows) == 2 * 2 * 3  # features, numbers of queries, ε
    for methods in rows.values():
        ours, rival = methods["density"]["accuracies"], methods["private_knn"]["accuracies"]
        assert len(ours) == len(rival) == 3
        # On each of the three sets of queries, not only in the mean.
        assert all(a > b for a, b in zip(ours, rival, strict=True))
    for features in entries("ind_knn_accuracy"):
        for row in results("ind_knn_accuracy", features)["rows"]:
            if row["accounting"].startswith("rdp"):
                found = row["in_hindsight"]
                assert found["gdp_gain"] > 2 * found["gdp_gain_error"]
                low, high = (0.004, 0.18) if row["accounting"] == "rdp" else (0.01, 0.95)
                assert low <= round(100 * found["gdp_gain"], 3) <= high
    speed = results("ind_knn_speed")["rows"]
    assert all(row["exact_ratio"] < 1.5 for row in speed if row["records"] == 50_000)
    shares = {(row["records"], row["batch"]): row["hashing_ratio"] for row in speed}
    for batch in (512, 1):
        assert shares[500_000, batch] < shares[50_000, batch] < 1
