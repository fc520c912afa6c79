"""A paid search over settings: what it costs, what it refuses before it draws, and how it goes on after a crash."""

import functools
import json

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn.cli.main import main
from pl_privknn.config import ConfigurationError, read_document
from pl_privknn.privacy.accounting.accountant import account
from pl_privknn.privacy.accounting.calibration import CalibrationError
from pl_privknn.privacy.ledger import BudgetExceeded, Ledger
from pl_privknn.privacy.mechanisms import Charge, Gaussian
from pl_privknn.privacy.noise import SeededNoise, SystemNoise
from pl_privknn.training import NoisySGD
from pl_privknn.training.configured import made_data, made_training
from pl_privknn.training.tuning import TuningRun, tuning_of
from tests.training.training_setup import Lit

RATES = {"model.init_args.optimization.lr": [0.0001, 0.5, 2.0]}


STATED = {"budget": {"epsilon": 1.0, "delta": 1e-5}, "expected_batch_size": 100, "private_records": 200}


def document(model=None, **trainer):
    arguments = {"extractor": {"class_path": "Pixels"}, **STATED}
    return {
        "data": {
            "class_path": "DigitsDataModule",
            "init_args": {"private_records": 200, "public_examples": 40},
        },
        "model": model or {"class_path": "NoisySGD", "init_args": arguments},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", **trainer},
    }


@functools.cache
def tuning_at(epsilon, score_noise=50.0):
    return tuning_of(document(), RATES, epsilon, score_noise=score_noise)


class Fixed(SeededNoise):
    """Tries each setting once, in order, with little noise."""

    trained = 0

    def stream(self, *key):
        if key[0] in ("count", "settings"):
            return self
        if key[0] == "candidate":
            Fixed.trained += 1
        return SeededNoise(3).stream(*key)

    def bernoulli(self, shape, p):
        self.asked = getattr(self, "asked", 0) + 1
        return torch.tensor([self.asked == 3])

    def integers(self, shape, below):
        return torch.arange(shape)


class Unread(SystemNoise):
    def random_words(self, count):
        raise AssertionError("something was drawn")


def test_the_noise_is_found_for_the_whole_search():
    tuning = tuning_of(document(), RATES, epsilon=4.0, mean=5.0)
    report = account([Charge(tuning.mechanism)], delta=1e-5)
    assert 3.9 < report.epsilon <= 4.0
    step, score = tuning.mechanism.candidate
    assert step == Charge(Gaussian(tuning.noise_multiplier, 1.0, 0.5), 4)
    assert score == Charge(Gaussian(50.0, 1.0, 1.0))
    data = made_data(tuning.document["data"])
    one, training = made_training(tuning.candidate(tuning.settings[1]), data, "x")
    assert training.noise_multiplier == tuning.noise_multiplier
    assert one.optimization.lr == 0.5


def test_the_best_is_released_alone_and_the_search_is_one_charge(tmp_path, monkeypatch):
    tuning, scores = tuning_at(50.0, 3.0), []
    original = Gaussian.add_noise

    def add_noise(self, values, noise):
        if values.numel() > 1:  # the noise of a step
            return original(self, values, noise)
        scores.append(1000 - int(values))  # as noise that turns the true order round
        return torch.tensor([scores[-1]])

    monkeypatch.setattr(Gaussian, "add_noise", add_noise)
    interrupted, optimizers = [], NoisySGD.configure_optimizers

    def configure_optimizers(self):
        interrupted.append(self.optimization.lr)
        if len(interrupted) == 2:
            raise OSError("power cut")
        return optimizers(self)

    monkeypatch.setattr(NoisySGD, "configure_optimizers", configure_optimizers)
    with pytest.raises(OSError, match="power cut"):
        TuningRun(tuning, tmp_path, noise=Fixed(0)).run()
    secret = tmp_path / ".candidates"
    assert secret.stat().st_mode & 0o077 == (secret / "private.sqlite").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="holds a run with other parameters"):
        TuningRun(tuning_at(4.0), tmp_path, noise=Fixed(0)).run()
    with pytest.raises(ValueError, match="says that all noise comes from a seed; continue as it began"):
        TuningRun(tuning, tmp_path, noise=SystemNoise()).run()
    result = TuningRun(tuning, tmp_path, noise=Fixed(0)).run()
    assert interrupted == [0.0001, 0.5, 0.5, 2.0]  # the candidate that was interrupted is trained anew
    assert len(scores) == 3
    assert result["right_noisy"] == max(scores) > scores[0]
    assert result["setting"] == tuning.settings[scores.index(max(scores))]
    assert 49.0 < result["epsilon"] <= 50.0
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("ledger")}
    assert left <= {"tuning.json", "result.json", "model.ckpt", "best.yaml", "run.lock"}
    report = Ledger.open_readonly(tmp_path / "ledger.sqlite").report()
    assert [charge.mechanism for charge in report.charged] == [tuning.mechanism]
    assert report.epsilon == report.epsilon_spent == result["epsilon"]
    weights = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert weights["network.weight"].any()
    assert TuningRun(tuning, tmp_path, noise=Unread()).run() == result


def test_a_search_that_does_not_fit_is_refused_before_anything_is_drawn(tmp_path):
    tuning = tuning_at(4.0)
    with pytest.raises(BudgetExceeded):
        TuningRun(tuning, tmp_path, max_epsilon=3.0, noise=Unread()).run()
    assert not (tmp_path / ".candidates").exists()
    assert Ledger.open_readonly(tmp_path / "ledger.sqlite").report().epsilon == 0.0
    with pytest.raises(CalibrationError):
        tuning_of(document(), RATES, epsilon=0.5, score_noise=1.0)


def test_a_search_whose_state_is_lost_is_not_repeated_for_free(tmp_path, monkeypatch):
    tuning = tuning_at(4.0)
    monkeypatch.setattr(NoisySGD, "configure_optimizers", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TuningRun(tuning, tmp_path, noise=Fixed(0)).run()
    (tmp_path / ".candidates" / "private.sqlite").unlink()
    with pytest.raises(ValueError, match="paid for and its state is lost"):
        TuningRun(tuning, tmp_path, noise=Fixed(0)).run()


class Linear(Lit):
    """A person's own module, for images of 20 by 20 pixels."""

    def __init__(self, lr=0.5):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(400, 10)), lr)
        self.accuracy = MulticlassAccuracy(10)


def of_a_module(*more, **arguments):
    private = {"class_path": "PrivateTraining", "init_args": {**STATED, **arguments}}
    return document({"class_path": f"{__name__}.Linear"}, callbacks=[private, *more])


CALLBACK = "trainer.callbacks.0.init_args"


def test_candidates_of_any_module_cost_what_those_of_noisy_sgd_do(tmp_path):
    values = {"model.init_args.lr": [0.0, 2.0, 1.0], f"{CALLBACK}.max_grad_norm": [0.5]}
    tuning = tuning_of(of_a_module(), values, 50.0, score_noise=3.0)
    same = tuning_of(document(), {"model.init_args.optimization.lr": [0.5, 2.0, 1.0]}, 50.0, score_noise=3.0)
    assert tuning.mechanism == same.mechanism
    result = TuningRun(tuning, tmp_path, noise=Fixed(0)).run()
    assert result["setting"]["model.init_args.lr"] > 0  # without a step nothing is learned
    assert 49.0 < result["epsilon"] <= 50.0
    best = read_document(tmp_path / "best.yaml")
    (section,) = best["trainer"]["callbacks"]
    assert section["init_args"]["noise_multiplier"] == tuning.noise_multiplier
    assert section["init_args"]["max_grad_norm"] == 0.5
    module, callback = made_training(best, made_data(best["data"]), "best")
    module.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"])
    assert callback.max_grad_norm == 0.5


SAME_COST = "changes nothing of a candidate's cost"


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        (document(), "trainer.max_epochs", SAME_COST),
        (document(), "model.init_args.expected_batch_size", SAME_COST),
        (document(), "model.init_args.noise_multiplier", SAME_COST),
        (document(), f"{CALLBACK}.max_grad_norm", SAME_COST),
        (document(), "model.init_args.options", SAME_COST),
        (document(), "model.init_args.options.noise_source.class_path", SAME_COST),
        (of_a_module(), f"{CALLBACK}.options.ledger_path", SAME_COST),
        (
            of_a_module(options={"noise_source": {"class_path": "SeededNoise"}}),
            "model.init_args.lr",
            r"options\.noise_source: a search draws",
        ),
        (document(), "model.init_args.optimization.noise_limit", r"noise_limit=-1\.0"),
        (of_a_module(), f"{CALLBACK}.expected_batch_size", SAME_COST),
        (of_a_module(), f"{CALLBACK}.noise_multiplier", SAME_COST),
        (of_a_module(), "trainer.callbacks.1.init_args.decay", SAME_COST),
        (of_a_module(groups={"members": [0]}), "model.init_args.lr", "groups: a search is charged for"),
        (
            document({"class_path": "NoisySGD", "init_args": {"groups": {"members": [0]}}}),
            "model.init_args.optimization.lr",
            "model.init_args.groups: a search is charged for",
        ),
        (
            of_a_module({"class_path": "EMAWeightAveraging"}),
            "model.init_args.lr",
            "leave other callbacks out",
        ),
        (document({"class_path": "VAT"}), "model.init_args.lr", "by NoisySGD or by the callback"),
    ],
)
def test_what_a_search_can_t_pay_for_is_refused(given, path, message):
    with pytest.raises(ConfigurationError, match=message):
        tuning_of(given, {path: [1.0, -1.0]}, epsilon=4.0)


def test_the_command_says_what_was_found_and_what_it_cost(tmp_path, capsys):
    config = tmp_path / "small.yaml"
    config.write_text(json.dumps(document()), encoding="utf-8")
    words = ["tune", str(config), "--epsilon", "6", "--set"]
    given = ["model.init_args.optimization.lr=1,2", "--mean", "1", "--output", str(tmp_path / "out")]
    assert main([*words, *given]) == 0
    found, folder = capsys.readouterr().out.splitlines()
    result = json.loads(found)
    assert folder == str(tmp_path / "out")
    assert 5.8 < result["epsilon"] <= 6.0
    assert result["guarantee"] == "unconditional"
    assert main([*words, "lr"]) == 2
    assert "PATH=V1,V2" in capsys.readouterr().err
