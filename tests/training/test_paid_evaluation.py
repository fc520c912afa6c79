"""The accuracy on a hold-out of private records: who is held out, what it costs, and that it is the true one."""

import itertools
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pl_privknn import NoisySGD
from pl_privknn.privacy import Budget, Charge, Gaussian, Ledger, epsilon_for_delta
from pl_privknn.privacy.card import holdout_text
from pl_privknn.privacy.holdout import (
    PaidEvaluation,
    counts_of,
    figures_of,
    held_out,
    records_for,
    release_figures,
    sensitivity,
)
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


def outcomes_of(count, num_classes, seed=0):
    """Classes and predictions of records, some without one."""
    drawn = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, num_classes, (count,), generator=drawn)
    predicted = torch.where(
        torch.rand(count, generator=drawn) < 0.7,
        truth,
        torch.randint(-1, num_classes, (count,), generator=drawn),
    )
    return torch.stack([truth, predicted], dim=1)


@pytest.mark.parametrize("unit", ["record", "person"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("num_classes", [None, 2, 3])
def test_no_neighbouring_hold_out_is_farther_than_the_sensitivity(num_classes, adjacency, unit):
    # All neighbours: of three records, or persons of one or two, the last one has every outcome.
    def all_of(count):
        if num_classes is None:
            return itertools.product([0.0, 0.25, 1.0], repeat=count)
        cells = itertools.product(range(-1, num_classes), repeat=2)
        return itertools.product(cells, repeat=count)

    others, owners = list(all_of(2))[5], [0, 1]
    sizes = [1, 2] if unit == "person" else [1]

    def counted(last):
        rows, people = [*others, *last], torch.tensor([*owners, *[2] * len(last)])
        return counts_of(torch.tensor(rows), num_classes, people if unit == "person" else None).double()

    last = [counted(one) for size in sizes for one in all_of(size)]
    if adjacency == "add_remove":
        moved = torch.stack([counts - counted(()) for counts in last]).norm(dim=1)
    else:
        moved = torch.cdist(torch.stack(last), torch.stack(last))
    # No less noise would do, and no more is taken.
    assert float(moved.max()) == pytest.approx(sensitivity(num_classes, adjacency), abs=1e-9)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_figures_without_noise_are_those_of_scikit_learn(num_classes):
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, recall_score

    outcomes = outcomes_of(500, num_classes).clamp(min=0)
    names = tuple("abcd"[:num_classes])
    found = figures_of(counts_of(outcomes, num_classes), 0.0, names)
    truth, predicted = outcomes.T.numpy()
    assert found["holdout_accuracy"] == pytest.approx(accuracy_score(truth, predicted), abs=1e-4)
    assert found["holdout_balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(truth, predicted), abs=1e-4
    )
    recalls = recall_score(truth, predicted, average=None)
    assert list(found["holdout_recall"]) == list(names)
    assert list(found["holdout_recall"].values()) == pytest.approx(recalls.tolist(), abs=1e-4)
    assert found["holdout_confusion"] == confusion_matrix(truth, predicted).tolist()
    assert found["holdout_baseline"] == pytest.approx(float(outcomes[:, 0].bincount().max()) / 500, abs=1e-4)


def test_a_person_counts_once_and_a_record_without_a_prediction_is_wrong():
    outcomes = torch.tensor([[0, 0], [0, 1], [0, 2], [2, -1], [-1, 0]])
    counts = counts_of(outcomes, 3, torch.tensor([5, 5, 5, 9, 9]))
    third = 1 / 3
    top, by_class = [third, 2 * third + 0.5], [third, 2 * third, 0, 0, 0, 0.5]
    torch.testing.assert_close(
        counts, torch.tensor([*top, *by_class, third, third, third, *[0] * 6], dtype=torch.float64)
    )
    assert counts_of(outcomes, 3)[:2].tolist() == [1, 3]


@pytest.mark.parametrize("num_classes", [None, 2, 5])
def test_standard_errors_are_the_spread_of_the_released_figures(num_classes):
    sigma, drawn, names = (
        8.0,
        torch.Generator().manual_seed(1),
        None if num_classes is None else list("abcde"[:num_classes]),
    )
    figures = []
    for seed in range(200):  # other samples and other noise
        outcomes = outcomes_of(600, num_classes or 2, seed)
        if num_classes is None:
            outcomes = (outcomes[:, 0] == outcomes[:, 1]).double()
        counts = counts_of(outcomes, num_classes).double()
        figures.append(figures_of(counts + sigma * torch.randn(counts.shape, generator=drawn), sigma, names))
    pairs = [("holdout_accuracy", "holdout_deviation")]
    if names is not None:
        pairs.append(("holdout_balanced_accuracy", "holdout_balanced_deviation"))
    for name, error in pairs:
        values, errors = (torch.tensor([one[key] for one in figures]).double() for key in (name, error))
        assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.25)
    if names is not None:
        values, errors = (
            torch.tensor([one[key]["b"] for one in figures]).double()
            for key in ("holdout_recall", "holdout_recall_deviation")
        )
        assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.25)


def test_too_few_records_are_told_with_the_number_that_would_do():
    sigma, names = 15.0, ("a", "b", "c")
    found = figures_of(counts_of(outcomes_of(20, 3), 3), sigma, names)
    assert found["holdout_deviation"] > 0.25
    assert (
        holdout_text(found) == f"too few held-out records to say: about {found['holdout_needed']} give ± 0.1"
    )
    enough = figures_of(counts_of(outcomes_of(found["holdout_needed"], 3), 3), sigma, names)
    assert enough["holdout_deviation"] <= 0.1
    assert "holdout_needed" not in enough
    assert records_for(3, sigma) < 1.1 * math.sqrt(15.0**2 / 0.01 + 0.25 / 0.01 * 150)
    said = holdout_text(enough)
    assert said.startswith(f"{enough['holdout_accuracy']:.3f} ± {enough['holdout_deviation']:.3f}")
    assert f"largest class {enough['holdout_baseline']:.3f}" in said


@pytest.mark.parametrize("unit", ["record", "person"])
def test_a_release_costs_what_the_training_does_and_is_made_once(tmp_path, unit):
    outcomes, names = outcomes_of(1000, 3), ("a", "b", "c")
    owners = torch.arange(1000) // 4 if unit == "person" else None
    given = {"classes": names, "budget": Budget(epsilon=1.0, unit=unit)}
    found = release_figures(tmp_path, "run", outcomes, owners, **given, noise=SeededNoise(0))
    ((charge),) = Ledger.open_readonly(tmp_path / "holdout.sqlite").report().charged
    assert charge.mechanism.l2_sensitivity == math.sqrt(3)
    assert 0.999 < epsilon_for_delta([Charge(Gaussian(charge.mechanism.sigma, math.sqrt(3)))], 1e-5) <= 1.0
    assert 0.99 < found["holdout_epsilon"] <= 1.0
    true = float((outcomes[:, 0] == outcomes[:, 1]).double().mean())
    assert abs(found["holdout_accuracy"] - true) < 5 * charge.mechanism.sigma / (
        250 if owners is not None else 1000
    )
    assert len(json.loads((tmp_path / "holdout.json").read_text())["holdout_confusion"]) == 3
    again = release_figures(tmp_path, "run", outcomes.flip(1), owners, **given, noise=SeededNoise(1))
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
    assert "on private records that were held out, released at ε" in write_report(tmp_path).read_text(
        encoding="utf-8"
    )
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
        hits.append(RecordGradients(module, private, 1.0).outcomes()[1][1:])
    assert torch.equal(*hits)
