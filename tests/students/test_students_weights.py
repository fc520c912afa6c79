"""Weights of students over a training: their average, fresh ones, learning rates."""

import copy

import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from pl_privknn.networks import build_network
from pl_privknn.students import FixMatchStudent, SupervisedStudent
from pl_privknn.students.base import EMA, lr_factor
from tests.students.student_setup import loaders, shuffled_digits, trainer


@pytest.fixture(scope="session")
def digits():
    return shuffled_digits()


def test_average_follows_its_recursion():
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    average = EMA(network, decay=0.3)
    want = {name: value.clone().double() for name, value in network.state_dict().items()}
    for update in range(6):
        network(torch.randn(8, 3))
        with torch.no_grad():
            network[0].weight.add_(torch.randn(3, 3))
        average.update(network)
        decay = min(0.3, (1 + update) / (10 + update))
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                want[name] = decay * want[name] + (1 - decay) * value.double()
    got = average.network.state_dict()
    assert got["1.num_batches_tracked"] == 6
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var"):
        assert torch.allclose(got[name].double(), want[name], atol=1e-5)
    assert average.updates == 6
    assert not any(parameter.requires_grad for parameter in average.parameters())


def test_the_average_serves_evaluation_and_the_network_training(digits, tmp_path):
    module = SupervisedStudent(image_size=8, ema_decay=0.9)
    trainer(tmp_path).fit(module, loaders(digits))
    images = digits[0][:40]
    module.eval()
    with torch.no_grad():
        given = module.normalize(images)
        assert torch.equal(module(images), module.ema.network(given))
        assert torch.equal(module.features(images), module.ema.network.features(given))
        assert not torch.equal(module(images), module.network(given))
    assert module.train().evaluation_network is module.network


def test_reinitialize_draws_into_the_same_tensors(digits, tmp_path):
    module = FixMatchStudent(network=build_network("small_cnn", 10, 1, 8), image_size=8, ema_decay=0.9)
    tensors = {name: id(tensor) for name, tensor in module.network.named_parameters()}
    trainer(tmp_path).fit(module, loaders(digits))
    trained = copy.deepcopy(module.state_dict())
    module.reinitialize()
    assert {name: id(tensor) for name, tensor in module.network.named_parameters()} == tensors
    state = module.state_dict()
    assert not torch.equal(state["network.classifier.weight"], trained["network.classifier.weight"])
    assert state["network.encoder.1.running_mean"].abs().sum() == 0
    assert state["network.encoder.1.num_batches_tracked"] == 0
    assert all(
        torch.equal(state[f"network.{name}"], value)
        for name, value in module.ema.network.state_dict().items()
    )
    assert module.ema.updates == 0
    first = state["network.encoder.0.weight"].clone()
    module.reinitialize()
    assert not torch.equal(first, module.state_dict()["network.encoder.0.weight"])


class Retrain(Callback):
    def __init__(self, epoch):
        self.epoch, self.rates, self.moments = epoch, [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            pl_module.reinitialize()
            self.moments = len(trainer.optimizers[0].state)


@pytest.mark.parametrize(("schedule_epochs", "totals"), [(None, (16, 8)), (2, (8, 8))])
def test_retraining_restarts_optimizer_and_schedule(schedule_epochs, totals, digits, tmp_path):
    retrain = Retrain(epoch=1)
    module = SupervisedStudent(
        image_size=8, optimization={"lr": 0.1, "optimizer": "sgd", "schedule_epochs": schedule_epochs}
    )
    trainer(tmp_path, max_epochs=4, callbacks=[retrain]).fit(module, loaders(digits))
    want = [0.1 * lr_factor("cosine", step, total) for total in totals for step in range(8)]
    assert retrain.rates == pytest.approx(want)
    assert retrain.rates[8] == 0.1
    assert retrain.moments == 0


def test_the_start_of_the_schedule_survives_a_resume(digits, tmp_path):
    whole, rest = Retrain(epoch=1), Retrain(epoch=1)
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer(tmp_path, max_epochs=5, callbacks=[whole, keep], enable_checkpointing=True)
    first, second = (SupervisedStudent(image_size=8, optimization={"lr": 0.1}) for _ in range(2))
    run.fit(first, loaders(digits))
    again = trainer(tmp_path, max_epochs=5, callbacks=[rest])
    again.fit(second, loaders(digits), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert len(rest.rates) == 8
    assert rest.rates == pytest.approx(whole.rates[12:])


def test_one_cycle_is_that_of_torch():
    total = 40
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total + 1, pct_start=0.3 + 0.7 / 41, cycle_momentum=False,
        final_div_factor=1e12,
    )  # fmt: skip
    want = []
    for _ in range(total + 1):
        want.append(cycle.get_last_lr()[0])
        optimizer.step()
        if len(want) <= total:
            cycle.step()
    # The rise of torch ends one step before its share of all steps: at 12 of 40 here too.
    assert want.index(max(want)) == 12
    assert [lr_factor("one_cycle", step, total) for step in range(total + 1)] == pytest.approx(want, abs=1e-9)


def test_decay_leaves_biases_and_norms_alone():
    choice = {"optimizer": "adamw", "weight_decay": 0.5, "lr": 0.1, "decay_vectors": False}
    choice["scheduler"] = "none"
    module = SupervisedStudent(network="wide_cnn", image_size=8, optimization=choice)
    optimizer = module.configure_optimizers()
    before = {name: value.detach().clone() for name, value in module.network.named_parameters()}
    for value in module.network.parameters():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    shrunk = {
        name for name, value in module.network.named_parameters()
        if torch.allclose(value, before[name] * (1 - 0.1 * 0.5)) and not torch.equal(value, before[name])
    }  # fmt: skip
    matrices = {name for name, value in before.items() if name.endswith("weight") and value.ndim > 1}
    assert shrunk == matrices
    assert all(
        torch.equal(value, before[n]) for n, value in module.network.named_parameters() if n not in matrices
    )


@pytest.mark.parametrize("network", ["small_cnn", "mlp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_weights_are_one_vector_to_helpers_and_activations_have_channels_last(network, channels):
    student = SupervisedStudent(network=network, num_classes=2, in_channels=channels, image_size=32)
    parameters = list(student.parameters())
    vector = parameters_to_vector(parameters)
    vector_to_parameters(2 * vector, parameters)
    assert torch.equal(parameters_to_vector(parameters), 2 * vector)
    layers = [layer for layer in student.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.2)
    assert student.normalize(torch.rand(4, channels, 32, 32)).stride(1) == 1
    assert student(torch.rand(4, channels, 32, 32)).shape == (4, 2)
