"""The accuracy on a hold-out of private records: who is held out, what it costs, and that it is the true one."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pl_privknn import NoisySGD
from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger, epsilon_for_delta
from pl_privknn.privacy.holdout import PaidEvaluation, held_out, release_accuracy
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.verify import audit_run
from pl_privknn.report import privacy_card, write_report
from pl_privknn.testing import clipped_sum
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData
from tests.setup.refusals import refusals
from tests.training.noisy_sgd_setup import PRIVATE, keep_last, make, make_data, make_trainer
from tests.training.training_setup import Lit, Silent, fit, training, weights

HALF = PaidEvaluation(0.5)


def test_coins_are_a_persons_lasting_and_of_the_stated_rate(tmp_path):
    numbers = torch.arange(20_000) // 2
    held = held_out(PaidEvaluation(0.3), tmp_path / "a", "run", numbers, False)
    assert torch.equal(held[::2], held[1::2])
    # Five standard errors: a false alarm in 1.7 million.
    assert abs(float(held.double().mean()) - 0.3) < 5 * math.sqrt(0.21 / 10_000)

    def resumed(numbers, records):
        return held_out(PaidEvaluation(0.3), tmp_path / "a", "run", numbers, True, lambda: [records])

    rows = [torch.arange(20_000.0), torch.arange(20_000)]
    assert torch.equal(
        held, held_out(PaidEvaluation(0.3), tmp_path / "a", "run", numbers, False, lambda: [rows])
    )
    assert torch.equal(held, resumed(numbers, rows))
    for changed in ((numbers, [rows[0].flip(0), rows[1]]), (numbers.flip(0), rows)):
        with pytest.raises(ValueError, match="not known to be those of the run's beginning"):
            resumed(*changed)
    with pytest.raises(ValueError, match="not known to be those of the run's beginning"):
        held_out(PaidEvaluation(0.3), tmp_path / "a", "run", numbers, True)
    # A coin depends on its number alone.
    assert torch.equal(held[100:], held_out(PaidEvaluation(0.3), tmp_path / "a", "run", numbers[100:], False))
    assert not torch.equal(held, held_out(PaidEvaluation(0.3), tmp_path / "b", "run", numbers, False))
    for changed in (PaidEvaluation(0.4), None):
        with pytest.raises(ValueError, match="began with another one"):
            held_out(changed, tmp_path / "a", "run", numbers, True)
    with pytest.raises(ValueError, match="began with no hold-out"):
        held_out(PaidEvaluation(0.3), tmp_path / "c", "run", numbers, True)
    assert held_out(None, tmp_path / "d", "run", numbers, False) is None


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_release_costs_what_the_training_does_and_is_made_once(tmp_path, unit):
    hits = torch.arange(1000) % 4 > 0
    owners = torch.arange(1000) // 4 if unit == "person" else None
    found = release_accuracy(
        tmp_path, "run", hits, owners, budget=Budget(epsilon=1.0, unit=unit), noise=SeededNoise(0)
    )
    ((charge),) = Ledger.open_readonly(tmp_path / "holdout.sqlite").report().charged
    assert charge.mechanism.l2_sensitivity == math.sqrt(2)
    assert 0.999 < epsilon_for_delta([Charge(Gaussian(charge.mechanism.sigma, math.sqrt(2)))], 1e-5) <= 1.0
    assert 0.99 < found["holdout_epsilon"] <= 1.0
    size = 250 if unit == "person" else 1000
    assert abs(found["holdout_accuracy"] - 0.75) < 5 * charge.mechanism.sigma * 1.25 / size
    assert found["holdout_deviation"] == pytest.approx(charge.mechanism.sigma * 1.25 / size, rel=0.4)
    again = release_accuracy(
        tmp_path, "run", ~hits, owners, budget=Budget(epsilon=1.0, unit=unit), noise=SeededNoise(1)
    )
    assert again == found


@pytest.fixture
def exact(monkeypatch):
    """Counts of hits without noise."""
    monkeypatch.setattr(Gaussian, "add_noise", lambda self, values, noise: values.double())


def held_of(folder, run):
    data = make_data()
    data.setup("fit")
    return held_out(HALF, folder, run, torch.arange(PRIVATE), True, data.private_batches)


@pytest.mark.parametrize("own", [True, False])
def test_the_accuracy_is_that_of_the_trained_module_on_records_that_it_has_not_seen(tmp_path, own, exact):
    # Without noise; a rate of 1 draws all records that are not held out.
    sizes = {
        "expected_batch_size": 60,
        "private_records": 60,
        "noise_source": Silent(0),
        "max_grad_norm": 100.0,
    }
    if own:
        module = make(extractor=False, noise_multiplier=1.0, evaluate=HALF, **sizes)
        callback = module.private_training
        make_trainer(tmp_path, 1).fit(module, make_data())
    else:
        module = Lit()
        callback, _ = fit(module, tmp_path, training(evaluate=HALF, **sizes), epochs=1)
    held, data = held_of(tmp_path, callback.privacy_summary()["run"]), make_data()
    data.setup("fit")
    images, labels = data.private.images(), data.private.labels
    with torch.no_grad():
        true = (module.eval()(images[held]).argmax(1) == labels[held]).float().mean()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        summary["holdout_accuracy"]
        == callback.accuracy["holdout_accuracy"]
        == pytest.approx(float(true), abs=1e-4)
    )
    assert summary["holdout_epsilon"] <= summary["epsilon"]
    if not own:
        start = Lit()
        rows = TensorDataset(images, labels)
        total = clipped_sum(start, rows, torch.nonzero(~held).flatten().tolist(), 100.0)
        torch.testing.assert_close(
            weights(module).double(), weights(start) - start.lr * total / 60, rtol=1e-4, atol=1e-5
        )
        assert "predicts a held-out record" not in summary["reason"]


def test_a_module_that_can_t_be_traced_has_a_condition_more(tmp_path):
    class Branches(Lit):
        def forward(self, x):
            return self.net(x) if x.sum() > 0 or self.training else self.net(-x)

    callback, _ = fit(Branches(), tmp_path, training(evaluate=PaidEvaluation(), noise_source=None), epochs=1)
    assert "Branches predicts a held-out record from that record alone" in callback.report().reason
    assert Ledger.open_readonly(tmp_path / "holdout.sqlite").report().guarantee.guarantee == "conditional"


def test_a_resumed_training_holds_out_the_same_records_and_releases_at_its_end(tmp_path):
    def run(checkpoint, **limits):
        module, callback = Lit(), training(evaluate=HALF, steps_per_charge=1)
        fit(module, tmp_path, callback, 3, callbacks=[keep_last(tmp_path)], ckpt_path=checkpoint, **limits)
        return callback

    class Stop(RuntimeError):
        pass

    class Stops(Lit):
        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                raise Stop

    callback = training(evaluate=HALF, steps_per_charge=1)
    with pytest.raises(Stop):
        fit(Stops(), tmp_path, callback, 3, callbacks=[keep_last(tmp_path)])
    assert not (tmp_path / "holdout.json").exists()
    held = held_of(tmp_path, callback.privacy_summary()["run"])
    with pytest.raises(ValueError, match=r"evaluate: the run in .* began with another one"):
        fit(Lit(), tmp_path, training(steps_per_charge=1), 3, ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    resumed = run(tmp_path / "ckpt" / "last.ckpt")
    assert torch.equal(held, held_of(tmp_path, resumed.privacy_summary()["run"]))
    assert resumed.accuracy["holdout_epsilon"] <= resumed.epsilon
    audit = audit_run(tmp_path)
    assert not audit["violated"]
    assert "holdout_epsilon" in {check["name"] for check in audit["checks"] if check["agrees"]}
    card = privacy_card(tmp_path)
    assert card["evaluation"].startswith(f"hold-out accuracy {resumed.accuracy['holdout_accuracy']:.3f} ± ")
    assert "on held-out private records, released at ε" in write_report(tmp_path).read_text(encoding="utf-8")
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "holdout_epsilon": 0.1}))
    assert audit_run(tmp_path)["violated"]


test_what_has_no_accuracy_or_no_parallel_payment_is_refused = refusals(
    {
        "evaluate='free'": lambda: training(evaluate="free"),
        "share=1.0": lambda: PaidEvaluation(1.0),
        "evaluate: the hold-out is charged in parallel": lambda: training(
            evaluate=PaidEvaluation(), epsilon=None, noise_multiplier=0.0
        ),
        "evaluate: the hold-out is charged in parallel with": lambda: training(
            evaluate=PaidEvaluation(), ledger_path="shared.sqlite"
        ),
    }
)


def test_a_module_without_classes_is_refused_before_anything_is_paid(tmp_path):
    class One(Lit):
        def forward(self, x):
            return self.net(x)[:, :1]

        def training_step(self, batch, batch_idx):
            return self(batch[0]).square().mean()

    with pytest.raises(ValueError, match="evaluate: One has one output"):
        fit(One(), tmp_path, training(evaluate=PaidEvaluation()), epochs=1)
    assert not list(tmp_path.rglob("*.sqlite"))


class Adapting(nn.Module):
    """A network that keeps a running mean of its inputs in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(64, 2), 0
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x):
        x = x.flatten(1)
        if not self.training:
            self.total += x.mean(0).detach()
            self.seen += 1
            x = x - self.total / self.seen
        return self.layer(x)


def test_a_network_of_others_meets_held_out_records_one_by_one_in_a_graph(tmp_path):
    module = NoisySGD(
        Adapting(), 2, image_size=8, budget=Budget(1.0, 1e-3), expected_batch_size=30, private_records=PRIVATE,
        evaluate=PaidEvaluation(0.3), run_dir=tmp_path / "run",
    )  # fmt: skip
    make_trainer(tmp_path, 1, limit_val_batches=0).fit(module, make_data())
    assert module.guarantee == "unconditional"
    assert not module.network.total.any()
    assert module.network.seen == 0
    hits = []
    for change in (0.0, 1.0):
        data = make_data()
        data.setup("fit")
        private = PrivateData(data)
        private.hold_out(torch.arange(PRIVATE) >= 50)
        batches = list(private.held_batches())
        batches[0][1][0].add_(change)
        private.held_batches = lambda batches=batches: iter(batches)
        hits.append(RecordGradients(module, private, 1.0).hits()[1][1:])
    assert torch.equal(*hits)
