"""What other devices and precisions change in private training, as far as a CPU shows it."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import TensorDataset

from pl_privknn.privacy.clipped_sums import ClippedSum
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData
from pl_privknn.training.traced_step import PrivateRandomness, TracedStep
from tests.training.test_exactly_once import IMAGES, LABELS, NORM, Net
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
