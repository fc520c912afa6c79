"""The figures of docs/methods/ind_knn.md are those that were measured, and the benchmarks' own arithmetic holds."""

import math

import pytest
import torch

from benchmarks import ind_knn_accuracy as accuracy
from benchmarks import ind_knn_features as features
from benchmarks import ind_knn_linear as linear
from benchmarks import ind_knn_report as report
from benchmarks import render
from benchmarks.record import results
from pl_privknn.testing import FreeLedger


def test_a_changed_figure_is_noticed(tmp_path, monkeypatch):
    text = report.PAGE.read_text(encoding="utf-8")
    assert render.update(report.fresh(), write=False) == []
    begin = text.index("<!-- speed:")
    changed = text[:begin] + text[begin:].replace(" ms |", " s |", 1)
    assert changed != text
    (tmp_path / "ind_knn.md").write_text(changed, encoding="utf-8")
    monkeypatch.setattr(report, "PAGE", tmp_path / "ind_knn.md")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    assert render.update(report.fresh(), write=False) == ["ind_knn.md"]
    assert render.update(report.fresh(), write=True) == ["ind_knn.md"]
    assert (tmp_path / "ind_knn.md").read_text(encoding="utf-8") == text


def test_claims_of_the_page_hold_in_the_results():
    """What the page says in words: density above Private-kNN, Gaussian DP above RDP, and the speed."""
    rows = report.accuracy_rows()
    assert len(report.cases()) == 2 * 2 * 3  # features, numbers of queries, ε
    for case in report.cases():
        rival = rows[(*case, "private_knn", "smaller of rdp and pld")]
        ours = rows[(*case, "density", "gdp")]
        assert len(ours["accuracies"]) == len(rival["accuracies"]) == 3
        # On each of the three sets of queries, not only in the mean.
        assert all(a > b for a, b in zip(ours["accuracies"], rival["accuracies"], strict=True))
        for method in ("density", "fixed"):
            for conversion in ("rdp", "rdp_classic"):
                found = rows[(*case, method, conversion)]["in_hindsight"]
                assert found["gdp_gain"] > 2 * found["gdp_gain_error"]
    speed = results("ind_knn_speed")["rows"]
    assert all(row["exact_ratio"] < 1.5 for row in speed if row["records"] == 50_000)
    shares = {(row["records"], row["batch"]): row["hashing_ratio"] for row in speed}
    for batch in (512, 1):
        assert shares[500_000, batch] < shares[50_000, batch] < 1


def test_the_simulated_stream_is_the_labelers():
    """The benchmark's stream over known similarities gives the labeler's own answers, draw for draw."""
    from pl_privknn.labelers.ind_knn.labeler import IndKNN
    from pl_privknn.privacy.noise import NoiseSource, SeededNoise

    class Unstreamed(SeededNoise):
        """Gives the labeler the very numbers that the simulation draws."""

        def stream(self, *key: int | str) -> NoiseSource:
            return self

    generator = torch.Generator().manual_seed(0)

    def part(count):
        labels = torch.arange(count) % features.CLASSES
        vectors = torch.eye(12)[labels] + 0.4 * torch.randn(count, 12, generator=generator)
        return features.Part(vectors, labels)

    tables = features.Tables(part(3000), part(80), part(300))
    known = accuracy.Similarities.of(tables)
    setting = accuracy.Setting("fixed", "plain", 0.6, None, 0.4, 0.0)
    asked = torch.arange(80)
    parameters = setting.parameters(0.5, 80, "rdp", 0.85)
    near = accuracy.neighborhoods(setting, known, asked, parameters)
    draws = SeededNoise(3).normal((80, 1 + features.CLASSES), 1.0)
    found = accuracy.stream(parameters, near, tables.private.labels.numpy(), draws[:, 0].numpy())
    simulated = accuracy.share_right(*found, tables.pool.labels.numpy(), draws[None, :, 1:])
    labeler = IndKNN(
        setting.threshold,
        parameters.sigma2,
        noise_source=Unstreamed(3),
        budgets={"budget": parameters.budget, "sigma1": parameters.sigma1},
    )
    labeler.fit(tables.private.features, tables.private.labels, features.CLASSES)

    released = labeler.label(tables.pool.features, FreeLedger()).labels
    assert simulated == float((released == tables.pool.labels).double().mean())
    # The setting's σ2 belongs to Gaussian DP; with a smaller budget each vote still costs the same share of it.
    gaussian = setting.parameters(0.5, 80, "gdp")
    assert parameters.sigma2**2 * parameters.budget == pytest.approx(
        0.85**2 * gaussian.sigma2**2 * gaussian.budget
    )


def test_interpolation_between_noise_levels():
    curve = [
        linear.Training(sigma, 50, 64, 8.0, score, 0.0, 0.1)
        for sigma, score in ((1, 0.9), (4, 0.8), (16, 0.6))
    ]
    assert linear.accuracy_at(curve, 2.0) == pytest.approx(0.85)
    assert linear.accuracy_at(curve, 100.0) == pytest.approx(0.6)
    assert linear.most_noise(curve, 0.7) == pytest.approx(8.0)
    assert linear.most_noise(curve, 0.5) == 16
    assert linear.most_noise(curve, 0.95) is None
    assert linear.epsilon(linear.least_sigma(1.0, 50, 2), 50, 2) == pytest.approx(1.0, rel=2e-3)
    assert math.isclose(linear.epsilon(3.0, 50, 2), linear.epsilon(3.0, 100, 1))
