import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pl_privknn.students import VATStudent
from pl_privknn.students.base import deterministic, frozen_statistics
from pl_privknn.students.vat import adversarial_direction, unit_directions
from tests.setup.refusals import refusals


def smooth_network(num_classes, dtype=torch.float64):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, num_classes)).to(dtype)


def hessians(network, images):
    """Hessian of KL(p(x) ‖ p(x + r)) in r at 0 for each image, by automatic differentiation twice."""
    result = []
    for image in images:
        target = network(image[None]).detach()

        def divergence(r, image=image, target=target):
            return kl_of(target, network(image[None] + r.view(1, *image.shape)))

        zero = torch.zeros(image.numel(), dtype=images.dtype)
        result.append(torch.autograd.functional.hessian(divergence, zero))
    return torch.stack(result)


def kl_of(target, logits):
    # In float64: the package's own divergence works in float32.
    p = target.softmax(dim=1)
    return (p * (p.log() - logits.log_softmax(dim=1))).sum()


def cosines(a, b):
    return F.cosine_similarity(a.flatten(1).double(), b.flatten(1).double()).abs()


def test_one_iteration_is_the_hessian_times_the_start():
    network = smooth_network(4)
    images, start = torch.rand(5, 1, 2, 3, dtype=torch.float64), torch.randn(5, 1, 2, 3, dtype=torch.float64)
    want = torch.einsum("nij,nj->ni", hessians(network, images), start.flatten(1))
    single = copy.deepcopy(network).float()
    x = images.float()
    found = adversarial_direction(single, x, single(x), xi=1e-3, start=start.float())
    assert cosines(found, want).min() > 0.999
    # A step of 1e-6 leaves one to two digits of a float32 difference.
    found = adversarial_direction(single, x, single(x), xi=1e-6, start=start.float())
    assert cosines(found, want).mean() > 0.8


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(9, 16), nn.BatchNorm1d(16)
        self.dropout, self.last = nn.Dropout(0.5), nn.Linear(16, 3)

    def forward(self, images):
        return self.last(self.dropout(self.norm(self.first(images.flatten(1)))))


def student(**kwargs):
    return VATStudent(network=WithDropout(), num_classes=3, image_size=3, **kwargs)


def test_statistics_move_by_the_labelled_and_the_clean_pass_alone():
    module, images, unlabeled = student(), torch.rand(8, 1, 3, 3), torch.rand(20, 1, 3, 3)
    twin = copy.deepcopy(module.network)
    module.objective(images, torch.zeros(8, dtype=torch.int64), unlabeled)
    with torch.no_grad():
        twin(images)
        twin(unlabeled)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(module.network.norm, name), getattr(twin.norm, name))
    only_labeled, twin = student(), None
    only_labeled.objective(images, torch.zeros(8, dtype=torch.int64), None)
    assert only_labeled.network.norm.num_batches_tracked == 1


def test_gradient_is_that_of_the_perturbed_pass_alone(monkeypatch):
    module, images = student(radius=0.7), torch.rand(20, 1, 3, 3)
    direction = unit_directions(torch.randn_like(images))
    monkeypatch.setattr("pl_privknn.students.vat.adversarial_direction", lambda *args, **kwargs: direction)
    with deterministic(module.network):
        clean = module.logits(images)
    parameters = list(module.network.parameters())
    got = torch.autograd.grad(module.divergence(images, clean).mean(), parameters)
    twin = copy.deepcopy(module.network)
    with deterministic(twin):
        log_q = twin(images + 0.7 * direction).log_softmax(dim=1)
    # The target's entropy is a constant: cross-entropy with a constant target has the same gradient.
    loss = -(clean.detach().softmax(dim=1) * log_q).sum(dim=1).mean()
    want = torch.autograd.grad(loss, list(twin.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_the_perturbation_has_the_stated_radius(monkeypatch):
    # Also where the student normalises: the radius is in pixels of [0, 1].
    module = student(radius=0.3, normalization={"mean": [0.5], "std": [0.25]})
    images, seen = torch.rand(6, 1, 3, 3), []
    logits = module.logits
    monkeypatch.setattr(module, "logits", lambda x: seen.append(x.detach()) or logits(x))
    module.divergence(images, module.clean_logits(images, False))
    assert (seen[-1] - images).flatten(1).norm(dim=1).allclose(torch.full((6,), 0.3), atol=1e-5)


def test_dropout_is_off_and_comes_back():
    module, images = student(radius=1e-6).train(), torch.rand(20, 1, 3, 3)
    assert module.divergence(images, module.clean_logits(images, update_statistics=False)).max() < 1e-6
    with (
        pytest.raises(RuntimeError, match="stop"),
        deterministic(module.network),
        frozen_statistics(module.network),
    ):
        raise RuntimeError("stop")
    assert all(part.training for part in module.network.modules())
    assert module.network.norm.track_running_stats


def test_the_direction_is_found_in_float32_under_mixed_precision(monkeypatch):
    module, found, images = VATStudent(network="small_cnn", image_size=8), [], torch.rand(16, 1, 8, 8)
    monkeypatch.setattr(
        "pl_privknn.students.vat.adversarial_direction",
        lambda *given, **named: found.append(adversarial_direction(*given, **named)) or found[-1],
    )
    for enabled in (True, False):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            module.divergence(images, module.clean_logits(images, update_statistics=False))
    assert torch.equal(*found)


WRONG = {"radius": 0, "xi": -1e-6, "power_iterations": 1.5, "vat_weight": -1}
test_bad_arguments_are_named = refusals(
    {f"{name}=": functools.partial(VATStudent, **{name: value}) for name, value in WRONG.items()}
)
