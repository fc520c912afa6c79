"""Attacks on trainings: honest ones are not accused, and without noise every coin is seen. Seeds are fixed."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import yaml

from benchmarks.faulty import LessNoise
from pl_privknn.auditing.attack import attack_training, log_likelihood_ratios, score_training
from pl_privknn.cli import main
from pl_privknn.privacy import clipped_sums
from pl_privknn.privacy.mechanisms import Gaussian
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.small_training import DELTA, small_training


@pytest.mark.parametrize(("method", "each"), [("NoisySGD", 0), ("PrivateTraining", 0), ("NoisySGD", 5)])
def test_an_honest_training_is_not_accused(method, each):
    found = attack_training(small_training(method, 2.0, DELTA, each), canaries=1000, noise=SeededNoise(2))
    assert (found.subject, found.released, found.runs) == (method, "sums", 1)
    assert found.canaries == 1000
    assert not found.violated
    assert 1.9 < found.epsilon <= 2.0
    assert 0.05 < found.epsilon_lower_bound <= found.epsilon


@pytest.mark.parametrize("method", ["NoisySGD", "PrivateTraining"])
def test_without_noise_every_coin_of_a_canary_that_was_drawn_is_seen(method):
    scored, stated, *_ = score_training(
        small_training(method, 2.0, DELTA), 200, LessNoise(1e9, SeededNoise(2))
    )
    # Nothing but its own draws is in a canary's direction: of those that were not there all steps say the same.
    mechanism = stated.mechanism
    rate, fit = mechanism.sampling_rate, (mechanism.l2_sensitivity / mechanism.sigma) ** 2 / 2
    never = 10 * math.log(1 - rate + rate * math.exp(-fit))
    there, away = scored.scores[scored.present], scored.scores[~scored.present]
    np.testing.assert_allclose(away, never, rtol=1e-6)
    # In ten steps at a rate of a tenth a canary is never drawn with probability 0.9¹⁰, 35 %; each draw counts alike.
    once = math.log(1 - rate + rate * math.exp(fit)) - never / 10
    draws = (there - never) / once
    np.testing.assert_allclose(draws, draws.round(), atol=1e-3)
    drawn = draws > 0.5
    assert 0.5 < drawn.mean() < 0.8
    assert draws.max() <= 10


def test_missing_clipping_and_less_noise_are_found(monkeypatch):
    target = small_training("PrivateTraining", 1.0, DELTA)
    assert attack_training(target, canaries=3000, noise=LessNoise(4.0, SeededNoise(1))).violated
    # What fills up a chunk has no finite norm, and counts as nothing here too.
    monkeypatch.setattr(clipped_sums, "clip_factors", lambda norms, *rest: norms.isfinite().double())
    assert attack_training(
        small_training("NoisySGD", 1.0, DELTA), canaries=1000, noise=SeededNoise(1)
    ).violated


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_scores_of_steps_are_log_likelihood_ratios(rate):
    """Literally, by the densities of the noise."""
    x, length, sigma = np.random.default_rng(3).normal(size=20), 0.7, 0.8
    there, away = (np.exp(-((x - at) ** 2) / (2 * sigma**2)) for at in (length, 0.0))
    wanted = np.log((rate * there + (1 - rate) * away) / away)
    found = log_likelihood_ratios(torch.tensor(x), Gaussian(sigma, length, rate))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9)


def test_the_command_attacks_a_training(tmp_path, capsys):
    settings = {"budget": {"epsilon": 2.0}, "expected_batch_size": 500, "private_records": 1000}
    callback = {"class_path": "pl_privknn.PrivateTraining", "init_args": settings}
    document = {
        "data": {"class_path": "DigitsDataModule"},
        "model": {"class_path": "attacked_module.Plain"},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "callbacks": [callback]},
    }
    (tmp_path / "attacked_module.py").write_text("from benchmarks.faulty import PlainClassifier as Plain\n")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    words = ["audit", "--attack", str(path), "--canaries", "200", "--seed", "0"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["subject"], told["canaries"], told["verdict"]) == ("PrivateTraining", 200, "OK")
    assert told["epsilon"] == pytest.approx(2.0, abs=0.02)


def test_a_target_is_left_as_it_was():
    target = small_training("NoisySGD", 2.0, DELTA)
    target.data.setup("fit")
    before = target.data.private
    score_training(target, 50, SeededNoise(0))
    assert target.data.private is before
    assert torch.equal(dataclasses.replace(target).data.private.labels, before.labels)
