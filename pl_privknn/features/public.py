"""Features learned from public examples: whitening, principal components, and the default features."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pl_privknn._checks import check_int, check_non_negative, check_positive, check_switch
from pl_privknn.features.base import (
    Extractor,
    LearnedExtractor,
    Pixels,
    PublicTables,
    check_images,
    in_parts,
    lasting_name,
)
from pl_privknn.features.hog import HOG
from pl_privknn.features.joined import JoinedFeatures
from pl_privknn.features.patches import PatchDictionary
from pl_privknn.features.pretrained import WEIGHT_PACKAGES, TimmFeatures

_TINY = 1e-9
# Wider features than this have their directions found by random projections; narrower ones by eigh, exactly.
_WIDE = 2048
_OVERSAMPLED = 50
# Singular values below this share of the largest one can't be told from products in double precision.
_RESOLVED = 1e-5


class PublicWhitening(nn.Module):
    """Centre features, project on leading principal directions, equalise variances, and scale rows to unit length.

    Mean and directions come from public examples, so they cost no privacy. Fewer and levelled directions help
    noisy SGD, whose noise grows with the number of weights: a linear model on HOG features of Fashion-MNIST at
    ε = 0.1 gains two to three points of accuracy by it.

    Args:
        in_features: width of the features.
        components: how many directions to keep; None only centres.
        power: each kept direction is divided by its standard deviation to this power: 0 leaves principal
            components as they are, 1 whitens them in full.

    Raises:
        ValueError: for arguments out of range.
    """

    mean: Tensor
    directions: Tensor
    fitted: Tensor

    def __init__(self, in_features: int, components: int | None = None, power: float = 0.5) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.components = None if components is None else check_int("components", components)
        if self.components is not None and self.components > self.in_features:
            raise ValueError(
                f"components={components} must be at most the width of the features, {in_features}"
            )
        self.power = check_non_negative("power", power)
        width = self.components or 0
        self.register_buffer("mean", torch.zeros(self.in_features))
        self.register_buffer("directions", torch.zeros(self.in_features, width))
        self.register_buffer("fitted", torch.tensor(False))

    @property
    def out_features(self) -> int:
        """Width of the result."""
        return self.components or self.in_features

    @torch.no_grad()
    def fit(self, public: Tensor) -> PublicWhitening:
        """Learn from public features, shape ``(m, in_features)``; returns itself.

        Raises:
            ValueError: if the shape differs, or there are fewer than ``components`` examples.
        """
        if public.ndim != 2 or public.shape[1] != self.in_features or len(public) < 1:
            raise ValueError(
                f"public: shape {tuple(public.shape)}; expected (m, {self.in_features}) with m ≥ 1"
            )
        if self.components is not None and self.components > len(public):
            raise ValueError(
                f"components={self.components} needs at least as many public examples, there are {len(public)}"
            )
        values = public.to(self.mean.device)
        mean = values.mean(dim=0, dtype=torch.float64)
        self.mean.copy_(mean)
        if self.components is not None:
            if self.in_features > _WIDE:
                kept, variances = leading_directions((values - mean).float(), self.components)
                variances = variances.square() / len(values)
            else:
                centred = values - mean
                variances, vectors = torch.linalg.eigh(centred.T @ centred / len(values))
                kept = vectors.flip(1)[:, : self.components]
                variances = variances.flip(0)[: self.components]
            # A sign is arbitrary and differs between machines; fixed, so that runs can be repeated.
            kept = kept * torch.where(kept.sum(dim=0) < 0, -1.0, 1.0)
            deviations = variances.clamp_min(0).sqrt()
            floor = _TINY + 1e-3 * float(deviations[0])
            self.directions.copy_(kept / deviations.clamp_min(floor) ** self.power)
        self.fitted.fill_(True)
        return self

    def forward(self, features: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, out_features)``; a row depends on its own features alone.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        if not torch.compiler.is_compiling() and not bool(self.fitted):  # an export follows no values
            raise RuntimeError("PublicWhitening must learn from public features first: call fit(public)")
        centred = features.to(self.mean.device, self.mean.dtype) - self.mean
        if self.components is not None:
            centred = centred @ self.directions
        return centred / centred.norm(dim=1, keepdim=True).clamp_min(_TINY)


def leading_directions(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Leading right singular vectors ``(d, count)`` and their singular values ``(count,)``; deterministic.

    By random projections (Halko, Martinsson, Tropp 2011) where few of many are wanted, by all otherwise. Each
    vector's largest entry is positive.
    """
    wanted = count + _OVERSAMPLED
    if 4 * wanted > min(values.shape):
        scales, found = _by_products(values, count)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _, scales, found = torch.svd_lowrank(values.cpu(), wanted, niter=4)
    found, scales = found[:, :count], scales[:count]
    largest = found.gather(0, found.abs().argmax(dim=0, keepdim=True))
    return (found * largest.sign()).to(values), scales.to(values)


def _by_products(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest singular values and their right vectors, by an eigendecomposition: a tenth of the time of an SVD.

    Squares lose half of the digits, so that directions of next to no variance are left to the SVD.
    """
    wide = values.shape[1] > len(values)
    exact = (values if wide else values.T).double()
    squares, vectors = torch.linalg.eigh(exact @ exact.T)
    scales, vectors = squares.clamp_min(0).sqrt().flip(0)[:count], vectors.flip(1)[:, :count]
    if not bool((scales > _RESOLVED * scales[0]).all()):
        _, scales, transposed = torch.linalg.svd(values, full_matrices=False)
        return scales, transposed.T
    return scales, exact.T @ vectors / scales if wide else vectors


class _OfFeatures(LearnedExtractor):
    """Base class of transformations of another extractor's features, learned from public ones."""

    extractor: Extractor
    keeps_beneath: ClassVar[bool] = True  # the table of the features beneath, for others that learn from them

    def beneath(self) -> Mapping[str, Extractor]:
        """The extractor."""
        return {"extractor": self.extractor}

    def chosen(self, examples: Tensor) -> Tensor:
        """Images, or features, used for learning."""
        return examples

    @abc.abstractmethod
    def learn_from(self, features: Tensor) -> dict[str, Tensor]:
        """Tensors learned from public features ``(m, d)``."""

    @abc.abstractmethod
    def change(self, features: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, components)``, of features ``(n, d)``."""

    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """See :meth:`learn_from`."""
        return self.learn_from(in_parts(self.extractor, self.chosen(images)))

    def of_public(self, public: PublicTables) -> Tensor:
        """See :meth:`Extractor.of_public`; the features beneath are computed once."""
        if not lasting_name(self):  # a subclass elsewhere may learn otherwise
            return super().of_public(public)
        features = public.features(self.extractor, self.keeps_beneath)
        self._digest, self._learned = b"", self.learn_from(self.chosen(features))
        return self.change(features)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, components)``."""
        return self.change(self.extractor(images))


class PublicPCA(_OfFeatures):
    """Principal components of another extractor's features, of equalised variance, each vector scaled to unit length.

    See :class:`~pl_privknn.features.public.PublicWhitening`, whose mean and directions come from public images.

    Args:
        extractor: whose features are taken.
        components: how many directions to keep; fewer where there are fewer public images.
        power: each direction is divided by its standard deviation to this power.

    Raises:
        ValueError: for arguments out of range.
    """

    keeps_beneath = False  # they are wide

    def __init__(self, extractor: Extractor, components: int = 300, power: float = 0.4) -> None:
        super().__init__()
        self.extractor = extractor
        self.components = check_int("components", components)
        self.power = check_non_negative("power", power)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """``components``, where there are as many public images, and values, at least."""
        return min(self.components, self.extractor.feature_size(image_shape))

    def learn_from(self, features: Tensor) -> dict[str, Tensor]:
        """Mean ``(d,)`` and directions ``(d, components)``."""
        kept = min(self.components, *features.shape)
        change = PublicWhitening(features.shape[1], kept, self.power).fit(features)
        return {"mean": change.mean, "directions": change.directions}

    def change(self, features: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, components)``."""
        mean, directions = (self.learned(name, features.device) for name in ("mean", "directions"))
        return functional.normalize((features - mean) @ directions, dim=1)


class PublicKernelPCA(_OfFeatures):
    """Principal components of an RBF kernel, learned from public images (Schölkopf, Smola, Müller 1998).

    An image is described by e^{−γ|f − l|²} for every landmark l, the features of a public image. Centred by the
    landmarks' means, projected on the leading directions of the landmarks and levelled, it is a vector on which
    linear models draw curved borders. An image is mapped on its own.

    Args:
        extractor: whose features f are taken, best of unit length.
        gamma: γ.
        components: directions that are kept; fewer where there are fewer landmarks.
        power: each direction is divided by its standard deviation to this power.
        landmarks: how many public images serve; None takes all of them.
        seed: of the choice of landmarks, a public matter.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self,
        extractor: Extractor,
        gamma: float = 1.3,
        components: int = 600,
        power: float = 0.7,
        landmarks: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.gamma = check_positive("gamma", gamma)
        self.components = check_int("components", components)
        self.power = check_non_negative("power", power)
        self.landmarks = None if landmarks is None else check_int("landmarks", landmarks, 2)
        self.seed = check_int("seed", seed, 0, 2**32 - 1)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """``components``, provided that there are at least as many landmarks."""
        return min(self.components, self.landmarks or self.components)

    def chosen(self, examples: Tensor) -> Tensor:
        """The landmarks, or their images."""
        if self.landmarks is None or self.landmarks >= len(examples):
            return examples
        generator = torch.Generator().manual_seed(self.seed)
        return examples[torch.randperm(len(examples), generator=generator)[: self.landmarks].sort().values]

    def learn_from(self, features: Tensor) -> dict[str, Tensor]:
        """Landmarks ``(l, d)``, their mean kernel values ``(l,)`` and the directions ``(l, components)``."""
        landmarks = features.float()
        kernel = torch.cat([self._kernel(part, landmarks) for part in landmarks.split(1024)])
        mean = kernel.mean(dim=0)
        centred = kernel - mean - mean[:, None] + mean.mean()
        # All of them but one at most: centring takes a dimension away.
        kept = max(1, min(self.components, len(landmarks) - 1))
        directions, values = leading_directions(centred, kept)
        values = values.clamp_min(max(1e-6 * float(values[0]), 1e-12))  # equal landmarks have none above 0
        # A landmark's coordinate in direction j is its entry of the eigenvector times √value.
        deviations = (values / len(landmarks)).sqrt()
        return {
            "landmarks": landmarks,
            "mean": mean,
            "directions": directions / values.sqrt() / deviations**self.power,
        }

    def change(self, features: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, components)``."""
        return in_parts(self._map, features.float())

    def _map(self, features: Tensor) -> Tensor:
        landmarks, mean, directions = (
            self.learned(name, features.device) for name in ("landmarks", "mean", "directions")
        )
        kernel = self._kernel(features, landmarks)
        centred = kernel - kernel.mean(dim=1, keepdim=True) - (mean - mean.mean())
        return functional.normalize(centred @ directions, dim=1)

    def _kernel(self, features: Tensor, landmarks: Tensor) -> Tensor:
        lengths = features.square().sum(dim=1, keepdim=True) + landmarks.square().sum(dim=1)
        distances = torch.addmm(lengths, features, landmarks.T, alpha=-2).clamp_(min=0)
        return distances.mul_(-self.gamma).exp_()


#: The network of the extra ``[imagenet]``.
PRETRAINED = "tf_efficientnet_lite0"
# Sides in pixels between which HOG, pixels and patches are computed.
_SMALLEST, _LARGEST = 20, 32
# Components that are computed, so that narrower features need not be computed anew.
_WIDEST = 300
# Weight of the pretrained network relative to the other three together: small images suit it less.
_WEIGHT, _WEIGHT_OF_LARGE = 0.4, 0.7


def has_pretrained() -> bool:
    """Whether timm and the weights of :data:`PRETRAINED` are installed."""
    return None not in map(importlib.util.find_spec, ("timm", WEIGHT_PACKAGES[PRETRAINED][0]))


class Resized(Extractor):
    """Another extractor's features of images resized to one size.

    Args:
        extractor: one that learns nothing, or a learned one.
        image_size: side of the square images that it sees, in pixels.
    """

    def __init__(self, extractor: Extractor, image_size: int) -> None:
        self.extractor, self.learns = extractor, extractor.learns
        self.image_size = check_int("image_size", image_size)

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`."""
        self.extractor.fit_public(self.resized(images))

    def learn_from_all(self, public: PublicTables) -> None:
        """See :meth:`Extractor.learn_from_all`."""
        if self.learns:
            self.extractor.fit_public(public.extracted(self.resized))

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        return self.extractor.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        self.extractor.load_state_dict(state)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """See :meth:`Extractor.feature_size`."""
        return self.extractor.feature_size((image_shape[0], self.image_size, self.image_size))

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 ``(n, d)``."""
        return self.extractor(self.resized(images))

    def resized(self, images: Tensor) -> Tensor:
        """Images in the size that the inner extractor gets."""
        check_images(images)
        size = (self.image_size, self.image_size)
        return functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)


class PublicFeatures(Extractor):
    """HOG, pixels, a patch dictionary and a pretrained network, joined, whitened and compressed by public images.

    Of vectors it takes the vectors alone. Each kind is scaled to unit length
    and weighted, the pretrained network (the extra ``[imagenet]``) by 0.4, and by 0.7 where images are larger than 32
    pixels; HOG, pixels and patches see those at 32 pixels. :class:`~pl_privknn.features.PublicPCA` compresses them.
    Which width suits follows from the number of private records and ε, see :func:`pl_privknn.recommend`.

    Args:
        components: width; fewer where there are fewer public images.
        power: of the whitening.
        pretrained: whether to take the pretrained network; None takes it where its weights are installed.

    Raises:
        ValueError: for arguments out of range.

    Example:
        >>> import torch
        >>> from pl_privknn.features import PublicFeatures
        >>> extractor = PublicFeatures(components=2)
        >>> extractor.fit_public(torch.rand(20, 64))  # twenty embeddings of 64 numbers
        >>> extractor(torch.rand(3, 64)).shape
        torch.Size([3, 2])
    """

    learns = True

    def __init__(self, components: int = 100, power: float = 0.4, pretrained: bool | None = None) -> None:
        self.components = check_int("components", components)
        self.power = check_non_negative("power", power)
        self.pretrained = pretrained if pretrained is None else check_switch("pretrained", pretrained)
        self._made: Extractor | None = None
        self._shape: tuple[int, ...] = ()

    def kinds(self, image_shape: Sequence[int]) -> tuple[list[Extractor], list[float]]:
        """Extractors for images of ``(channels, height, width)``, or vectors ``(d,)``, and their weights.

        Raises:
            FileNotFoundError: for ``pretrained=True`` where its weights are not installed.
        """
        if len(image_shape) == 1:
            return [Pixels(normalize=True)], [1.0]
        channels, height, width = image_shape
        kinds: list[Extractor] = [HOG(), Pixels(transform_sqrt=True), PatchDictionary()]
        weight = 0.0
        if not _SMALLEST <= min(height, width) <= max(height, width) <= _LARGEST:
            size = min(max(_SMALLEST, height, width), _LARGEST)
            kinds = [Resized(kind, size) for kind in kinds]
        if channels in (1, 3) and (has_pretrained() if self.pretrained is None else self.pretrained):
            weight = _WEIGHT if max(height, width) <= _LARGEST else _WEIGHT_OF_LARGE
            kinds.append(TimmFeatures(PRETRAINED))
        weights = [(1 - weight) / 3] * 3 + ([weight] if weight else [])
        return kinds, weights

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`."""
        check_images(images)
        self._extractor(tuple(images.shape[1:])).fit_public(images)

    def of_public(self, public: PublicTables) -> Tensor:
        """See :meth:`Extractor.of_public`; all widths share one table."""
        table = public.features(self._extractor(tuple(public.images(torch.arange(1)).shape[1:])))
        return functional.normalize(table[:, : self.components], dim=1)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """``components``, where there are as many public images, and values, at least."""
        return min(self.components, image_shape[0]) if len(image_shape) == 1 else self.components

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        if self._made is None:
            return {}
        return {"image_shape": torch.tensor(self._shape), **self._made.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        if "image_shape" in state:
            learned = {name: value for name, value in state.items() if name != "image_shape"}
            self._extractor(tuple(state["image_shape"].tolist())).load_state_dict(learned)

    def __call__(self, images: Tensor) -> Tensor:
        """Unit vectors, float32 ``(n, components)``.

        Raises:
            RuntimeError: before :meth:`fit_public`.
            ValueError: for images of another shape than the public ones.
        """
        if self._made is None:
            raise RuntimeError(
                "PublicFeatures must learn from public examples first: call fit_public(images)"
            )
        if not torch.compiler.is_compiling() and tuple(images.shape[1:]) != self._shape:
            raise ValueError(
                f"images: shape {tuple(images.shape)}; the public ones were {self._shape} each, which all must be"
            )
        return functional.normalize(self._made(images)[:, : self.components], dim=1)

    def _extractor(self, shape: tuple[int, ...]) -> Extractor:
        if self._made is None or shape != self._shape:
            kinds, weights = self.kinds(shape)
            joined: Any = kinds[0] if len(kinds) == 1 else JoinedFeatures(kinds, weights)
            # The leading components of a wider projection are those of a narrower one, so that all widths share it.
            self._made = PublicPCA(joined, max(self.components, _WIDEST), self.power)
            self._shape = shape
        return self._made


#: Longest side of the grey images that :class:`DefaultFeatures` takes HOG of, in pixels.
_SMALL_GREY = 32


class DefaultFeatures(Extractor):
    """Features by default: HOG of small grey images, :class:`~pl_privknn.features.PublicFeatures` of all others.

    On digits HOG and then the student's features served Private-kNN and Ind-KNN at least as well, in less time;
    HOG describes colours, textures and objects poorly.
    """

    learns = True

    def __init__(self) -> None:
        self._hog = HOG()
        self._chosen: Extractor | None = None

    def _for(self, image_shape: Sequence[int]) -> Extractor:
        channels, *sides = image_shape
        grey = len(sides) == 2 and channels == 1 and max(sides) <= _SMALL_GREY
        return self._hog if grey else PublicFeatures()

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`."""
        check_images(images)
        self._chosen = self._for(images.shape[1:])
        if self._chosen.learns:
            self._chosen.fit_public(images)

    def of_public(self, public: PublicTables) -> Tensor:
        """See :meth:`Extractor.of_public`."""
        self._chosen = self._for(public.images(torch.arange(1)).shape[1:])
        return public.features(self._chosen)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """See :meth:`Extractor.feature_size`."""
        return self._for(image_shape).feature_size(image_shape)

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        return {} if self._chosen is None else self._chosen.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        self._chosen = self._for((1,) if state else (1, _SMALL_GREY, _SMALL_GREY))
        self._chosen.load_state_dict(state)

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 ``(n, d)``."""
        if self._chosen is None:
            check_images(images)
            self._chosen = self._for(images.shape[1:])
        return self._chosen(images)
