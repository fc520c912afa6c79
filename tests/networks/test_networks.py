import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from pl_privknn.networks import FeatureNetwork, available_networks, build_network, register_network
from pl_privknn.networks.architectures import _BUILDERS
from tests.setup.refusals import refusals


def convolutions(network):
    return [
        (module.out_channels, *module.kernel_size)
        for module in network.modules()
        if isinstance(module, nn.Conv2d)
    ]


def dense(network):
    return [module.out_features for module in network.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("name", ["small_cnn", "wide_cnn", "mnist_cnn", "svhn_cnn", "cifar_cnn"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (1, (9, 14))])
def test_logits_are_the_classifier_on_the_features(name, channels, size):
    network = build_network(name, num_classes=7, in_channels=channels, image_size=size).eval()
    images = torch.rand(3, channels, *np.broadcast_to(size, 2))
    with torch.no_grad():
        features, logits = network.features(images), network(images)
        again = network.classifier(features)
    assert features.shape == (3, network.feature_size)
    assert logits.shape == (3, 7)
    assert torch.equal(logits, again)


def test_layers_are_those_of_the_supplement():
    # Tables 1 and 2 of Private-kNN's supplement, section D, and the CIFAR-10 network of its section 4.2.
    mnist = build_network("mnist_cnn", 10, 1, 28)
    assert convolutions(mnist) == [(64, 5, 5), (128, 5, 5)]
    assert dense(mnist) == [384, 192, 10]
    assert sum(isinstance(module, nn.MaxPool2d) for module in mnist.modules()) == 2
    svhn = build_network("svhn_cnn", 10, 3, 32)
    assert convolutions(svhn) == [(96, 3, 3)] * 3 + [(192, 3, 3)] * 3 + [(192, 5, 5)]
    assert dense(svhn) == [192, 192, 10]
    assert convolutions(build_network("cifar_cnn", 10, 3, 32)) == [(32, 3, 3), (64, 3, 3), (128, 3, 3)]


def small(**given):
    return build_network(
        **{"name": "small_cnn", "num_classes": 10, "in_channels": 1, "image_size": 8, **given}
    )


# Modules that other tests import make one more network known.
KNOWN = "cifar_cnn, linear_probe, mlp, mnist_cnn, small_cnn, svhn_cnn, (tanh_cnn, )?wide_cnn"
test_what_does_not_fit_is_named = refusals(
    {
        rf"'resnet'.*{KNOWN}.*timm:NAME": lambda: build_network("resnet"),
        r"image_size=\(3, 3\) does not fit network='wide_cnn'": lambda: small(name="wide_cnn", image_size=3),
        "num_classes": lambda: small(num_classes=1),
        "in_channels": lambda: small(in_channels=0),
        "image_size=0": lambda: small(image_size=0),
        r"image_size=\(8, 8, 8\)": lambda: small(image_size=(8, 8, 8)),
        r"timm has no model 'resnet17'; similar: .*resnet": lambda: build_network("timm:resnet17"),
        "name a local file after '@'": lambda: build_network("timm:test_resnet@absent.pth"),
    }
)


def test_a_registered_network_is_built_by_name(monkeypatch):
    monkeypatch.setattr("pl_privknn.networks.architectures._BUILDERS", dict(_BUILDERS))

    def linear(num_classes, in_channels, image_size):
        return FeatureNetwork(nn.Flatten(), in_channels * image_size**2, num_classes)

    register_network("linear", linear)
    assert "linear" in available_networks()
    assert build_network("linear", 5, 2, 4)(torch.rand(3, 2, 4, 4)).shape == (3, 5)
    with pytest.raises(ValueError, match="'linear' is taken"):
        register_network("linear", linear)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_timm_models_have_features(name):
    network = build_network(f"timm:{name}", num_classes=4, in_channels=1, image_size=32).eval()
    images = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        features, logits = network.features(images), network(images)
        again = network.model.get_classifier()(features)
    assert features.shape == (2, network.feature_size)
    assert torch.allclose(logits, again, atol=1e-6)
    assert logits.shape == (2, 4)


def assert_body_of(path, source):
    loaded = build_network(f"timm:test_resnet@{path}", 4, 3, 32)
    ours, theirs = dict(loaded.model.named_parameters()), dict(source.model.named_parameters())
    assert ours["fc.weight"].shape[0] == 4
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("fc."))


def test_timm_weights_come_from_a_file_or_the_cache_and_are_never_fetched(tmp_path, monkeypatch):
    source = build_network("timm:test_resnet", num_classes=1000, in_channels=3, image_size=32)
    torch.save(source.model.state_dict(), tmp_path / "weights.pth")
    assert_body_of(tmp_path / "weights.pth", source)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no pretrained weights in the Hugging Face or torch cache"):
        build_network("timm:test_resnet@cache", 4, 3, 32)
    repository = timm.models.get_pretrained_cfg("test_resnet").hf_hub_id.replace("/", "--")
    folder = tmp_path / f"models--{repository}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    save_file(source.model.state_dict(), folder / "snapshots" / "abc" / "model.safetensors")
    assert_body_of("cache", source)
