"""Networks beside themselves: honest ones pass, those in which examples meet or weights serve twice do not."""

import copy

import pytest
import torch
from noisy_sgd_setup import NoNoise, fit, literal_sum, losses, make, make_data
from torch import nn
from torch.nn import functional as F

from pl_privknn.baselines.heads import FeatureHead, build_head
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.networks import available_networks, build_network
from pl_privknn.training.clipping import ClippedGradients
from pl_privknn.training.layer_checks import with_group_norm
from pl_privknn.training.network_checks import CannotRunError

METHODS = ("flat", "ghost")


def check(network, shape=(1, 8, 8), method="flat"):
    ClippedGradients(network, 1.0, method).check(shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", available_networks())
def test_all_named_networks_pass(name, method):
    size = 20 if name == "tanh_cnn" else 8
    check(with_group_norm(build_network(name, 3, 1, size)), (1, size, size), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_heads_pass(kind, method):
    check(build_head(kind, 12, 3, hidden_size=8), (12,), method)
    check(build_head("linear", 12, 3, bias=False), (12,), method)


def test_only_a_linear_head_may_have_no_bias():
    assert [name for name, _ in build_head("linear", 12, 3, bias=False).named_parameters()] == ["weight"]
    with pytest.raises(ValueError, match='bias=False: head="mlp" has biases'):
        FeatureHead(head="mlp", bias=False)


class Net(nn.Module):
    """A hidden layer, whatever a test does to its values, and a last layer."""

    def __init__(self, between=lambda hidden, net: hidden):
        super().__init__()
        self.enc, self.out, self.between = nn.Linear(64, 16), nn.Linear(16, 2), between
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        return self.out(torch.tanh(self.between(self.enc(x.flatten(1)), self)))


def attend(h):
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.1)


def remember(hidden, net):
    net.seen += hidden.detach().mean(0)
    return hidden


HONEST = {
    "plain": Net(),
    "dropout layers": nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 2), nn.AlphaDropout(0.2)),
    "functional dropout": Net(lambda h, net: F.dropout(h, 0.5, training=net.training)),
    "attention in an example": Net(lambda h, net: attend(h.view(-1, 1, 4, 4)).flatten(1)),
    "normalised rows": Net(lambda h, net: h / (1e-3 + h.norm(dim=1, keepdim=True))),
    "tiny weights": Net(lambda h, net: h * 1e-12),
    "large weights": Net(lambda h, net: h * 1e12),
    "single precision inside": Net(lambda h, net: net.out.weight.new_ones(1) * h.float()),
    "unused parameter": nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).requires_grad_(True),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HONEST)
def test_honest_networks_pass(name, method):
    check(HONEST[name], method=method)


MIXING = {
    "mean": (lambda h, net: h - h.mean(0), "before layer 'out'"),
    "a little": (lambda h, net: h - 1e-3 * h.mean(0), "before layer 'out'"),
    "in training alone": (lambda h, net: h - h.mean(0) if net.training else h, "before layer 'out'"),
    "permutation": (lambda h, net: h.flip(0), "before layer 'out'"),
    "attention": (lambda h, net: attend(h[None])[0], "before layer 'out'"),
    "gradients alone": (lambda h, net: h - (h.mean(0) - h.mean(0).detach()), "'enc"),
    "scaled gradients": (lambda h, net: 2 * h - h.detach() if len(h) > 1 else h, "'enc"),
    "buffer": (remember, "buffer 'seen'"),
    "chance": (lambda h, net: h + torch.rand_like(h), "second pass"),
    "batch alone": (lambda h, net: h.squeeze(0), "single example|mixes"),
    "weight again": (lambda h, net: F.linear(torch.tanh(h @ net.enc.weight), net.enc.weight), "'enc.weight'"),
    "infinite": (lambda h, net: h / 0 - h / 0, "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MIXING)
def test_networks_in_which_no_gradient_belongs_to_one_example_are_refused(name, method):
    between, told = MIXING[name]
    with pytest.raises(ValueError, match=rf"(?s)^network: .*({told})") as caught:
        check(Net(between), method=method)
    assert "\n" not in str(caught.value)


def test_a_layer_called_twice_has_sound_gradients_without_ghost_clipping_alone():
    network = Net(lambda h, net: net.enc(F.pad(h, (0, 48))))
    check(network, method="flat")
    with pytest.raises(ValueError, match="Opacus can't give per-example gradients"):
        check(network, method="ghost")


def test_a_layer_that_mixes_is_named():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    with pytest.raises(ValueError, match="layer '2' mixes"):
        check(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Centred(), nn.Linear(8, 2)))


def test_last_weights_of_zero_hide_nothing():
    network = Net(lambda h, net: h - h.mean(0))
    nn.init.zeros_(network.out.weight)
    nn.init.zeros_(network.out.bias)
    with pytest.raises(ValueError, match="mixes"):
        check(network)
    tied = Net(MIXING["weight again"][0])
    nn.init.zeros_(tied.out.weight)
    with pytest.raises(ValueError, match=r"'enc\.weight'"):
        check(tied, method="ghost")


def test_the_refused_weight_used_twice_would_lose_a_part_and_keep_to_the_bound():
    """The sum is made of what the norms were taken of: what a network does beside its layers isn't in it."""
    torch.manual_seed(0)
    network = Net(MIXING["weight again"][0])
    for parameter in network.parameters():
        parameter.data *= 4
    clipped = ClippedGradients(network, 1.0, "ghost")
    clipped._checked.add((1, 8, 8))  # as if it had passed
    clipped.attach()
    moved = max(
        float(clipped.sum(x[None], y[None], losses).norm()) for x, y in zip(*examples(64), strict=True)
    )
    assert 0.99 < moved <= 1 + 1e-5
    clipped.detach()
    clipped._checked.clear()
    with pytest.raises(ValueError, match=r"'enc\.weight'"):
        clipped.sum(*examples(2), losses)  # also without a call of check


def examples(count):
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 2


@pytest.mark.parametrize("method", METHODS)
def test_a_check_leaves_no_trace(method):
    network = Net(lambda h, net: F.dropout(h, 0.5))
    clipped = ClippedGradients(network, 1.0, method)
    clipped.attach()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    clipped.check((1, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(parameter.grad is not None for parameter in network.parameters())
    assert clipped.sum(*examples(3), losses).any()  # and the hooks are on, as they were


@pytest.mark.parametrize("method", METHODS)
def test_images_with_colours_last_in_memory_have_the_same_gradients(method):
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    x, y = torch.rand(4, 8, 8, 3, generator=generator).permute(0, 3, 1, 2), torch.arange(4) % 2
    clipped = ClippedGradients(network, 0.1, method)
    clipped.attach()
    torch.testing.assert_close(
        clipped.sum(x, y, losses), literal_sum(network, x, y, 0.1), rtol=1e-4, atol=1e-5
    )


def test_networks_are_refused_before_anything_is_written_drawn_or_read(tmp_path):
    class Sealed(ArraysDataModule):
        def private_images(self, start, stop):
            raise AssertionError("a private record was read")

    mixing = MIXING["mean"][0]
    with pytest.raises(ValueError, match="mixes"):
        make(False, network=Net(mixing))  # at once, where its images have the size that the arguments say
    later = make(False, network=Net(mixing), image_size=28, noise_source=NoNoise())
    with pytest.raises(ValueError, match="mixes"):
        fit(later, tmp_path, data=make_data(Sealed))
    assert not list(tmp_path.rglob("*.sqlite"))
    with pytest.raises(CannotRunError, match=r"no inputs of shape \(3, 1, 8, 8\)"):
        fit(make(False, network=nn.Linear(5, 2)), tmp_path, data=make_data(Sealed))
    assert not list(tmp_path.rglob("*.sqlite"))
