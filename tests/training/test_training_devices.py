"""What other devices and precisions change in private training, as far as a CPU shows it."""

import contextlib

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import TensorDataset

from pl_privknn.neighbors.search import full_precision
from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData
from pl_privknn.training.traced_step import PrivateRandomness, TracedStep
from tests.setup.pretended_device import FAR, DispatchedDevice
from tests.training.noisy_sgd_setup import make_data
from tests.training.test_exactly_once import COUNT, IMAGES, LABELS, NORM, Net
from tests.training.training_setup import Lit, fit, training


def test_rows_that_the_compiled_loops_do_not_take_are_summed_alike():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 40, generator=generator).bfloat16()  # as on other devices
    rows[4, 3] = torch.nan
    total = ClippedSum([40], 0.5, torch.device("cpu"))
    total.add([rows])
    for row in rows:
        total.add_one([row])
    literal = [
        row.double() * min(1.0, 0.5 / float(row.double().norm())) for row in rows if row.isfinite().all()
    ]
    torch.testing.assert_close(total.finish(), 2 * torch.stack(literal).sum(0), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("layers", [False, True])
def test_every_chunk_has_the_same_number_of_rows(monkeypatch, layers):
    """Kernels differ by the number of rows, and one record less must not change the gradients of others."""
    module, sizes = Net(), set()
    network = (module.net, lambda x: x) if layers else None
    data = PrivateData(TensorDataset(IMAGES, LABELS))
    made = RecordGradients(module, data, NORM, layers=network, expected_batch_size=30)
    made.choose(timed=False)
    rows = TracedStep.rows
    monkeypatch.setattr(TracedStep, "rows", lambda self, stack: sizes.add(len(stack[0])) or rows(self, stack))
    module.net.register_forward_pre_hook(lambda layer, given: sizes.add(len(given[0])))
    for count in (16, 17, 3, 1):
        found = made.sum(range(count))
        alone = sum(made.sum([place]) for place in range(count))
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-9)
    assert sizes == {16}


def gradients_of(module, layers=False, data=None, **given):
    network = (module.net, lambda x: x) if layers else None
    data = PrivateData(TensorDataset(IMAGES, LABELS)) if data is None else data
    made = RecordGradients(module, data, NORM, layers=network, expected_batch_size=30, **given)
    made.choose(timed=False)
    return made


class Untraced(Net):
    """A step that can't be traced, over layers of which the first is frozen and written to."""

    def __init__(self):
        super().__init__()
        next(self.net.parameters()).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        float(loss)
        next(self.net.parameters()).data.zero_()
        return loss


@pytest.mark.parametrize("layers", [False, True])
def test_sums_on_another_device_mix_no_devices_and_wait_seldom(layers):
    wanted = gradients_of(Net(), layers).sum(range(COUNT))
    with DispatchedDevice() as device:
        made = gradients_of(Net().to(FAR), layers)
        before = device.waits
        found = made.sum(range(COUNT)).cpu()
        waits = device.waits - before
    assert (made.way.name, made.device) == ("layers" if layers else "vmap", FAR)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert waits <= 2 * 3 + 1  # two chunks of records and labels, and the sum


def test_a_step_that_is_not_traced_runs_on_the_cpu_alone():
    with DispatchedDevice(), pytest.raises(ValueError, match=r"training_step: can't be traced .* on a GPU"):
        gradients_of(Untraced().to(FAR))


def test_an_image_that_cannot_be_read_counts_as_zero(monkeypatch):
    data = make_data()
    data.setup("fit")
    made, read = gradients_of(Net(), data=PrivateData(data)), data.private.store.read

    def unreadable(rows):
        if bool((rows == 5).any()):
            raise OSError("truncated")
        return read(rows)

    wanted = made.sum([3, 4, 6])
    monkeypatch.setattr(data.private.store, "read", unreadable)
    torch.testing.assert_close(made.sum([3, 4, 5, 6]), wanted, rtol=1e-6, atol=1e-9)
    assert not made.sum([5]).any()


def test_chunks_that_do_not_fit_into_memory_are_halved(monkeypatch):
    rows = TracedStep.rows

    def bounded(self, stack):
        if len(stack[0]) > 5:
            raise torch.OutOfMemoryError
        return rows(self, stack)

    wanted = gradients_of(Net()).sum(range(11))
    monkeypatch.setattr(TracedStep, "rows", bounded)
    made = gradients_of(Net())
    assert (made.way.name, made.way.chunk) == ("vmap", 4)
    torch.testing.assert_close(made.sum(range(11)), wanted, rtol=1e-6, atol=1e-9)


def test_a_training_keeps_autocast_and_leaves_tf32_out_of_gradients(monkeypatch):
    rows, seen = TracedStep.rows, []
    product = torch.backends.mkldnn
    if hasattr(product, "matmul"):  # torch from 2.9

        def precision():
            return product.matmul.fp32_precision

    else:
        precision = torch.get_float32_matmul_precision

    def noted(self, stack):
        seen.append((precision(), torch.is_autocast_enabled("cpu")))
        return rows(self, stack)

    monkeypatch.setattr(TracedStep, "rows", noted)
    made = gradients_of(Net())
    with full_precision(torch.device("cpu")):  # restores what follows
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            made.sum(range(4))
    assert seen[-1] in (("highest", True), ("ieee", True))


@pytest.mark.parametrize("shares", [True, False])
def test_frozen_layers_are_copied_where_a_step_writes_to_them(monkeypatch, shares):
    if not shares:
        monkeypatch.delattr(torch, "_lazy_clone")
    module = Untraced()
    made = gradients_of(module)
    sums = [made.sum([place]) for place in (0, 1)]
    torch.testing.assert_close(made.sum([0, 1]), sum(sums), rtol=1e-6, atol=1e-9)
    assert next(module.net.parameters()).any()
    assert bool(sums[1].any())


class Attends(Lit):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.MultiheadAttention(8, 2, batch_first=True))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.net(*[x[:, 0]] * 3)[0].mean(1))


def test_16_bits_do_not_make_a_guarantee_conditional(tmp_path):
    private, _ = fit(Attends(), tmp_path, training(), 1, precision="bf16-mixed")
    assert private.conditions == ()
    assert private.way == "traced"


def test_a_device_without_float64_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", property(lambda self: torch.device("mps")))
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda self, device: None)
    with pytest.raises(ValueError, match="accelerator='mps': has no float64"):
        fit(Lit(), tmp_path)
    assert not list(tmp_path.rglob("*.sqlite"))


def test_buffers_of_private_records_are_found_before_they_move_to_a_device(tmp_path):
    images = torch.rand(90, 1, 8, 8)

    class Holds(Lit):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", images[:4])

    class NotReached(pl.Callback):
        def on_fit_start(self, *_):
            raise AssertionError("the strategy has moved the module")

    data = torch.utils.data.DataLoader(TensorDataset(images, torch.arange(90) % 2))
    with pytest.raises(ValueError, match=r"table \(4, 1, 8, 8\) shares memory"):
        fit(Holds(), tmp_path, training(), data=data, callbacks=[NotReached()], limit_val_batches=0)


def test_draws_of_a_gpu_are_seen(monkeypatch):
    states = [torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[0])
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    randomness = PrivateRandomness(device=torch.device("cuda", 0))
    randomness.drew = False
    randomness.begin()
    assert not randomness.drawn()
    states.reverse()  # as after dropout on that device
    assert randomness.drawn()


def test_a_training_of_no_batches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="limit_train_batches=0: no step would be left"):
        fit(Lit(), tmp_path, limit_train_batches=0)


def test_dropout_that_draws_on_a_gpu_is_traced(monkeypatch):
    """Its masks follow from the generator of the GPU alone: that of the CPU stands still."""
    true = {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}
    monkeypatch.setattr(torch.random, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.random, "set_rng_state", lambda state: None)
    for name, function in {
        "get_rng_state": lambda device: true["get_rng_state"](),
        "set_rng_state": lambda state, device: true["set_rng_state"](state),
        "manual_seed": lambda seed: None,
        "device": lambda device: contextlib.nullcontext(),
        "device_count": lambda: 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    made = RecordGradients(Lit(net), PrivateData(TensorDataset(IMAGES, LABELS)), NORM)
    made.randomness = PrivateRandomness(device=torch.device("cuda", 0))
    made.choose(timed=False)
    assert (made.way.name, made.condition) == ("vmap", None)
