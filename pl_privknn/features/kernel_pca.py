"""Principal components learned from public images: of features themselves, and of a kernel on them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_int, check_non_negative, check_positive
from pl_privknn.features.base import Extractor, LearnedExtractor, PublicTables, in_parts, lasting_name
from pl_privknn.features.whitening import PublicWhitening, leading_directions


class _OfFeatures(LearnedExtractor):
    """A change of another extractor's features, learned from public ones."""

    extractor: Extractor
    keeps_beneath: ClassVar[bool] = True  # the table of the features beneath, for others that learn from them

    def beneath(self) -> Mapping[str, Extractor]:
        """The extractor."""
        return {"extractor": self.extractor}

    def chosen(self, examples: Tensor) -> Tensor:
        """Images, or features, that are learned from."""
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
    """Principal components of another extractor's features, levelled, each image scaled to unit length.

    See :class:`~pl_privknn.features.whitening.PublicWhitening`, whose mean and directions come from public images.

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
        """``components``, where there are as many landmarks at least."""
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
        values = values.clamp_min(1e-6 * float(values[0]))
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
