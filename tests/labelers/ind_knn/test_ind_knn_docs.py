"""Words of docs/methods/ind_knn.md hold in the stored results, and the benchmark's stream is the labeler's."""

import torch
from ind_knn_setup import Draws, teacher

from benchmarks import ind_knn_accuracy as accuracy
from benchmarks.record import results
from pl_privknn.testing import FreeLedger


def test_claims_of_the_page_hold_in_the_results():
    """Density above Private-kNN, Gaussian DP above RDP, and the speed."""
    rows = accuracy.stored_rows()
    assert len(rows) == 2 * 2 * 3  # features, numbers of queries, ε
    for methods in rows.values():
        ours, rival = methods["density"]["accuracies"], methods["private_knn"]["accuracies"]
        assert len(ours) == len(rival) == 3
        # On each of the three sets of queries, not only in the mean.
        assert all(a > b for a, b in zip(ours, rival, strict=True))
    for features in accuracy.FEATURES:
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


def test_the_simulated_stream_is_the_labelers():
    """The benchmark's stream over known similarities gives the labeler's own answers, draw for draw."""
    generator = torch.Generator().manual_seed(0)

    def part(count):
        labels = torch.arange(count) % accuracy.CLASSES
        vectors = torch.eye(12)[labels] + 0.4 * torch.randn(count, 12, generator=generator)
        return accuracy.Part(accuracy.unit_rows(vectors), labels)

    private, pool = part(3000), part(80)
    parameters = accuracy.Setting("plain", 0.6, None, 0.4).parameters(0.5, 80)
    near = accuracy.Setting("plain", 0.6, None, 0.4).near(parameters, pool.to(private), pool.to(private))
    draws = Draws(3).normal((80, 1 + accuracy.CLASSES), 1.0)
    found = accuracy.stream(parameters, near, private.labels.numpy(), draws[:, 0].numpy())
    simulated = accuracy.share_right(found, pool.labels, draws[None, :, 1:])
    labeler = teacher(0.6, 0.4, budget=parameters.budget, sigma1=parameters.sigma1, noise_source=Draws(3))
    labeler.fit(private.features, private.labels, accuracy.CLASSES)
    released = labeler.label(pool.features, FreeLedger()).labels
    assert simulated == float((released == pool.labels).double().mean())
