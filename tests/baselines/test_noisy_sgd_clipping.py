"""Gradients of noisy SGD: clipped sums against a loop over examples, networks that mix examples."""

import math

import pytest
import torch
from noisy_sgd_setup import fit, literal_sum, losses, make
from torch import nn

from pl_privknn.baselines import NoisySGD
from pl_privknn.networks import build_network
from pl_privknn.privacy.noisy_steps import clip_factors
from pl_privknn.training.clipping import ClippedGradients
from pl_privknn.training.layer_checks import with_group_norm


def networks():
    torch.manual_seed(3)
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(400, 16), nn.Tanh(), nn.Linear(16, 5))
    frozen[1].requires_grad_(False)
    return {
        "convolutions": build_network("tanh_cnn", 5, 1, 20),
        "group norm": with_group_norm(build_network("small_cnn", 5, 1, 20)),
        "frozen part": frozen,
    }


@pytest.mark.parametrize("name", ["convolutions", "group norm", "frozen part"])
@pytest.mark.parametrize("method", ["flat", "ghost"])
@pytest.mark.parametrize("clip_norm", [0.05, 1.5, 1000.0])
def test_clipped_sum_equals_a_loop_over_examples(name, method, clip_norm):
    network = networks()[name]
    x, y = torch.rand(7, 1, 20, 20), torch.arange(7) % 5
    expected = literal_sum(network, x, y, clip_norm)
    clipped = ClippedGradients(network, clip_norm, method, physical_batch_size=3)
    clipped.attach()
    # Factors are 1e-5 below the literal ones, so that rounding can't exceed the bound.
    torch.testing.assert_close(clipped.sum(x, y, losses), expected, rtol=1e-4, atol=1e-5)
    clipped.detach()


CONVOLUTIONS = {
    "one dimension": (nn.Conv1d(2, 3, 3, stride=2), (2, 9)),
    "three dimensions": (nn.Conv3d(2, 3, 2, padding=1), (2, 4, 4, 4)),
    "groups": (nn.Conv2d(4, 8, 3, stride=2, padding=(2, 1), dilation=2, groups=2, bias=False), (4, 9, 9)),
    "same": (nn.Conv2d(2, 3, 3, padding="same"), (2, 7, 7)),
    "frozen bias": (nn.Conv2d(2, 3, 3), (2, 7, 7)),
}
CONVOLUTIONS["frozen bias"][0].bias.requires_grad_(False)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_ghost_sums_of_all_kinds_of_convolutions_equal_a_loop_over_examples(name):
    layer, shape = CONVOLUTIONS[name]
    network = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(5))
    x, y = torch.rand(6, *shape), torch.arange(6) % 5
    network(x)
    expected = literal_sum(network, x, y, 0.5)
    clipped = ClippedGradients(network, 0.5, "ghost", physical_batch_size=4)
    clipped.attach()
    torch.testing.assert_close(clipped.sum(x, y, losses), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_no_example_moves_the_sum_by_more_than_the_clipping_norm(method):
    clipped = ClippedGradients(build_network("tanh_cnn", 5, 1, 20), 0.7, method)
    clipped.attach()
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e3):
        x, y = scale * torch.randn(6, 1, 20, 20, generator=generator), torch.arange(6) % 5
        whole = clipped.sum(x, y, losses)
        for i in range(6):
            others = torch.arange(6) != i
            moved = whole - clipped.sum(x[others], y[others], losses)
            assert float(moved.norm()) <= 0.7 * (1 + 1e-6)
    assert float(whole.norm()) > 0.7  # it does clip


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_a_record_with_a_broken_gradient_contributes_nothing(method):
    clipped = ClippedGradients(build_network("tanh_cnn", 5, 1, 20), 0.7, method)
    clipped.attach()
    x, y = torch.rand(4, 1, 20, 20), torch.arange(4)
    x[2] = math.nan
    good = torch.tensor([0, 1, 3])
    torch.testing.assert_close(clipped.sum(x, y, losses), clipped.sum(x[good], y[good], losses))
    assert not clipped.sum(x[2:3], y[2:3], losses).any()


def test_a_pass_that_failed_leaves_nothing_in_the_next_sum():
    clipped = ClippedGradients(build_network("tanh_cnn", 5, 1, 20), 0.7, "ghost")
    clipped.attach()
    x, y = torch.rand(4, 1, 20, 20), torch.arange(4)
    expected = clipped.sum(x, y, losses)
    with pytest.raises(ValueError, match="first dimension"):
        clipped._ghost(3, lambda kept: losses(clipped.network(x), y))  # after the gradients of all four
    torch.testing.assert_close(clipped.sum(x, y, losses), expected)


def test_clip_factors():
    norms = torch.tensor([0.0, 0.5, 2.0, math.inf, math.nan])
    factors = clip_factors(norms, 1.0)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0]), rtol=2e-5, atol=0)
    assert float(factors[2]) * 2.0 <= 1.0


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_networks_that_mix_examples_are_refused(method):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 2)

        def forward(self, x):  # two rows an example
            return self.layer(x.reshape(-1, 32)).reshape(-1, 2, 2).sum(dim=1)

    clipped = ClippedGradients(Doubled(), 1.0, method)
    clipped.attach()
    with pytest.raises(ValueError, match="first dimension"):
        clipped.sum(torch.rand(3, 64), torch.tensor([0, 1, 0]), losses)


def test_batch_norm_is_refused_with_a_remedy_also_where_it_is_frozen(tmp_path):
    with pytest.raises(ValueError, match="group_norm"):
        NoisySGD("small_cnn", budget={"noise_multiplier": 1.0}, batches={"sampling_rate": 0.1})
    frozen = build_network("small_cnn", 2, 1, 8)
    for module in frozen.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    with pytest.raises(ValueError, match="BatchNorm2d"):
        NoisySGD(frozen, num_classes=2, budget={"noise_multiplier": 1.0}, batches={"sampling_rate": 0.1})
    with pytest.raises(ValueError, match="track_running_stats"):
        make(False, network=nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True)))
    module = make(extractor=False, network="small_cnn", batch_norm="group_norm")
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    fit(module, tmp_path, epochs=1, limit_train_batches=1)
    assert module.planned_steps == 1
