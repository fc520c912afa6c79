"""Base of extractors: maps from examples to vectors, fitted to public examples alone."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_privknn._checks import check_switch, shape_text
from pl_privknn.config import HasInitArguments, as_section
from pl_privknn.neighbors.search import full_precision


class Extractor(HasInitArguments, abc.ABC):
    """Maps images of shape ``(n, channels, height, width)``, float32 in [0, 1], or vectors, to ``(n, d)`` float32.

    An extractor learns nothing from the images that it is given: its output for one image never depends on
    another image, private or public. (Statistics of private images in a feature would be an uncharged
    release.) One that :attr:`learns` does so in :meth:`fit_public`, from public images alone.
    """

    #: Whether :meth:`fit_public` must come before the first image.
    learns: bool = False

    def fit_public(self, images: Tensor) -> None:
        """Learn from all public images, shape ``(m, channels, height, width)``; most extractors learn nothing.

        The same images give the same extractor, so a resumed run learns again what it had.
        """

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """Number of values per image of shape ``(channels, height, width)``; known before :meth:`fit_public`."""
        return int(self(torch.zeros(1, *image_shape)).shape[1])

    def state_dict(self) -> dict[str, Tensor]:
        """State that :meth:`fit_public` learned; empty for extractors that learn nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict`, instead of :meth:`fit_public`."""

    def learn_from_all(self, public: PublicTables) -> None:
        """Learn as :meth:`fit_public` does; overridden by extractors that need not load all public images at once."""
        if self.learns:
            self.fit_public(public.images())

    def of_public(self, public: PublicTables) -> Tensor:
        """Learn from public images, and return the features of all of them, float32 ``(m, d)`` on the CPU."""
        self.learn_from_all(public)
        return public.extracted(self)

    def follow(self, device: torch.device) -> None:
        """Move frozen networks, of this extractor and those within, for which no device was stated."""
        for part in (*vars(self).values(), *getattr(self, "extractors", ())):
            if isinstance(part, Extractor):
                part.follow(device)

    @abc.abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Return features of ``images``."""


def extract_on(extractor: Callable[[Tensor], Tensor], images: Tensor, device: torch.device) -> Tensor:
    """Features of images, computed in full float32 on ``device`` or on that of the extractor's parameters.

    Args:
        extractor: an :class:`Extractor`, or any module that maps images to vectors.
        images: float32, shape ``(n, channels, height, width)``, wherever they are.
        device: for extractors that follow their images, and frozen networks of theirs.

    Returns:
        Shape ``(n, d)``, on the CPU.
    """
    parameter = next(extractor.parameters(), None) if isinstance(extractor, nn.Module) else None
    place = device if parameter is None else parameter.device
    if isinstance(extractor, Extractor):
        extractor.follow(place)
    with contextlib.nullcontext() if torch.compiler.is_compiling() else full_precision(place):
        return extractor(images.to(place)).cpu()


IMAGES_AT_ONCE = 1024
_VALUES_AT_ONCE = 1 << 22  # of images: memory that is used again, where the system would clear new pages
_Known = dict[str, tuple[dict[str, Tensor], Tensor]]
#: By public data set: what extractors learned from it, and the features of all its images.
_TABLES: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def forget_features(public: Any) -> None:
    """Forget the features of a public data set whose examples have changed."""
    _TABLES.pop(public, None)


class PublicTables:
    """Features of all images of a public data set, computed once for extractors of the same arguments.

    They are kept in memory as long as the data set is. Extractors of other packages, and those whose arguments are
    not plain values, are computed at each call.

    Args:
        public: has ``images(indices)`` and a length; public images alone.
        device: for extractors that follow their images.
    """

    def __init__(self, public: Any, device: torch.device | None = None) -> None:
        self.public, self.device = public, device or torch.device("cpu")
        self.images = public.images

    def features(self, extractor: Extractor, keep: bool = True) -> Tensor:
        """Features, float32 ``(m, d)`` on the CPU, of the extractor after its fit to the public images.

        Args:
            extractor: learns from the public images, or takes what an equal one has learned from them.
            keep: whether the table is kept, if there is none yet.
        """
        known, name = _TABLES.setdefault(self.public, {}), lasting_name(extractor)
        if name in known:
            state, table = known[name]
            extractor.load_state_dict(state)
            return table
        with torch.no_grad():
            table = extractor.of_public(self)
        if keep and name:
            known[name] = extractor.state_dict(), table
        return table

    def extracted(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Vectors of all images by a function, on the CPU."""
        parts = torch.arange(len(self.public)).split(at_once(self.public.image_shape))
        return torch.cat([extract_on(function, self.images(part), self.device) for part in parts])


def at_once(image_shape: Sequence[int]) -> int:
    """Number of images of ``(channels, height, width)`` in one batch; smaller for large images."""
    return max(16, min(IMAGES_AT_ONCE, _VALUES_AT_ONCE // math.prod(image_shape)))


def lasting_name(extractor: Extractor) -> str:
    """Class and arguments of an extractor that determine its features; empty for all others."""
    section, left_out = as_section(extractor)
    return "" if left_out or not _own(section) else json.dumps(section, sort_keys=True)


def alike(first: Any, second: Any) -> bool:
    """Whether two extractors have equal arguments and equal learned states, and so give equal features."""
    if not (isinstance(first, Extractor) and isinstance(second, Extractor)):
        return False
    if not (name := lasting_name(first)) or name != lasting_name(second):
        return False
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _own(section: Any) -> bool:
    """Whether all classes named in a section are defined in this package."""
    if isinstance(section, dict):
        own = str(section.get("class_path", "pl_privknn.")).startswith("pl_privknn.")
        return own and all(map(_own, section.values()))
    return not isinstance(section, list) or all(map(_own, section))


class LearnedExtractor(Extractor):
    """Base class of extractors that learn tensors from public images, with inner extractors that may learn too.

    What was learned moves to the device of the images that come.
    """

    learns = True

    def __init__(self) -> None:
        self._learned: dict[str, Tensor] = {}
        self._digest = b""

    def beneath(self) -> Mapping[str, Extractor]:
        """Inner extractors, by their names in the state."""
        return {}

    @abc.abstractmethod
    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """Tensors learned from public images, once the extractors beneath have learned."""

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`; does nothing for the images of the last call."""
        check_images(images)
        digest = hashlib.sha256(images.contiguous().cpu().numpy().data).digest()
        if digest == self._digest:
            return
        for extractor in self.beneath().values():
            extractor.fit_public(images)
        with torch.no_grad():
            self._learned = self.learn(images)
        self._digest = digest

    def learned(self, name: str, device: torch.device) -> Tensor:
        """Learned tensor of this name, on a device.

        Raises:
            RuntimeError: before :meth:`fit_public`.
        """
        if name not in self._learned:
            raise RuntimeError(
                f"{type(self).__name__} must learn from public examples first: call fit_public(images)"
            )
        tensor = self._learned[name]
        if tensor.device != device:
            tensor = self._learned[name] = tensor.to(device)
        return tensor

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        state = {name: tensor.cpu() for name, tensor in self._learned.items()}
        for place, extractor in self.beneath().items():
            state |= {f"{place}.{name}": tensor for name, tensor in extractor.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        self._digest = b""
        self._learned = {name: tensor for name, tensor in state.items() if "." not in name}
        for place, extractor in self.beneath().items():
            start = f"{place}."
            inner = {
                name.removeprefix(start): value for name, value in state.items() if name.startswith(start)
            }
            extractor.load_state_dict(inner)


def in_parts(function: Callable[[Tensor], Tensor], images: Tensor, at_once: int = IMAGES_AT_ONCE) -> Tensor:
    """Apply a function to many images, a part at a time."""
    return torch.cat([function(part) for part in images.split(at_once)])


def check_images(images: Tensor) -> None:
    """Raise ``ValueError`` unless these are floats ``(n, channels, height, width)``, or vectors ``(n, d)``."""
    if images.ndim not in (2, 4) or not images.is_floating_point():
        raise ValueError(
            f"images: shape {shape_text(images.shape)}, {images.dtype}; expected float32 in [0, 1] of shape "
            "(n, channels, height, width), or vectors (n, d)"
        )


def learn_publicly(extractor: Callable[[Tensor], Tensor], public: PublicTables) -> None:
    """Fit an extractor that learns to all public images, which are not read for others."""
    if isinstance(extractor, Extractor) and extractor.learns:
        if lasting_name(extractor):
            public.features(extractor)
        else:
            extractor.learn_from_all(public)


class Pixels(Extractor):
    """Values of an image as one vector: for tables of embeddings, and for teachers that take images.

    Args:
        normalize: scale each vector to unit length, by itself.
        transform_sqrt: take the square root of each pixel first; images must not be negative.

    Example:
        >>> import torch
        >>> from pl_privknn.features import Pixels
        >>> Pixels()(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 64])
    """

    def __init__(self, normalize: bool = False, transform_sqrt: bool = False) -> None:
        self.normalize = check_switch("normalize", normalize)
        self.transform_sqrt = check_switch("transform_sqrt", transform_sqrt)

    def __call__(self, images: Tensor) -> Tensor:
        """Vectors, float32 ``(n, channels · height · width)``; a vector of zeros stays one.

        Raises:
            ValueError: if ``images`` is negative where ``transform_sqrt`` is set.
        """
        vectors = images.detach().flatten(1).to("cpu", torch.float32)
        if self.transform_sqrt:
            if not torch.compiler.is_compiling() and bool((vectors < 0).any()):
                raise ValueError(
                    "images: some values are negative, transform_sqrt=True needs values in [0, 1]"
                )
            vectors = vectors.sqrt()
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
