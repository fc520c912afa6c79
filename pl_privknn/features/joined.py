"""Extractors made of others: concatenated features, and features computed once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_positive
from pl_privknn.config import as_section
from pl_privknn.features.base import Extractor, LearnedExtractor, PublicTables, extract_on


class JoinedFeatures(LearnedExtractor):
    """Concatenated vectors of several extractors, each scaled to unit length and weighted.

    The squared distance of two images is then the weighted sum of their squared distances under each extractor.
    An image's vector depends on that image alone, as for every extractor.

    Args:
        extractors: at least one.
        weights: one a kind of features, above 0; all equal by default.

    Raises:
        ValueError: for no extractor, or weights that do not fit.
    """

    def __init__(self, extractors: list[Extractor], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if not extractors:
            raise ValueError("extractors=[] must name at least one extractor")
        chosen = [1.0] * len(extractors) if weights is None else list(weights)
        if len(chosen) != len(extractors):
            raise ValueError(f"weights={chosen!r}: expected one for each of {len(extractors)} extractors")
        self.extractors = list(extractors)
        self.weights = [check_positive("weights", weight) for weight in chosen]
        # Whatever is callable will do, for instance torch.nn.Flatten().
        self.learns = any(getattr(extractor, "learns", False) for extractor in extractors)

    def beneath(self) -> Mapping[str, Extractor]:
        """Inner extractors that learn, by their positions."""
        places = enumerate(self.extractors)
        return {str(place): part for place, part in places if getattr(part, "learns", False)}

    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """Return no tensors: only the inner extractors learn."""
        return {}

    def learn_from_all(self, public: PublicTables) -> None:
        """See :meth:`Extractor.learn_from_all`."""
        for extractor in self.beneath().values():
            extractor.learn_from_all(public)

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32, shape ``(n, d)`` with d the sum of the extractors' widths."""
        parts = [
            functional.normalize(extract_on(extractor, images, images.device).float(), dim=1) * weight**0.5
            for extractor, weight in zip(self.extractors, self.weights, strict=True)
        ]
        return torch.cat(parts, dim=1).to(images.device)


#: By what an extractor is and the public images that it saw: what it learned.
_LEARNED: dict[bytes, dict[str, Tensor]] = {}
#: By what an extractor is and learned: vectors, by digests of their images.
_KNOWN: dict[bytes, dict[bytes, Tensor]] = {}


class CachedFeatures(Extractor):
    """Features of another extractor, computed once for each image in a process.

    For comparisons whose runs ask for the same features: ``privknn compare --workers 0`` makes them in one process.
    Two extractors with the same arguments that learned from the same public images share what they know. That is
    exact, as an image's vector depends on that image alone.

    The vectors of private images stay in this process's memory until it ends; they are written nowhere.

    Args:
        extractor: computes them. Its arguments must be plain values or other extractors, so that it is known again.

    Raises:
        ValueError: for an extractor whose arguments can't be compared.

    Example:
        >>> import torch
        >>> from pl_privknn.features import HOG, CachedFeatures
        >>> extractor = CachedFeatures(HOG())
        >>> images = torch.rand(3, 1, 28, 28)
        >>> torch.equal(extractor(images), extractor(images.flip(0)).flip(0))
        True
    """

    def __init__(self, extractor: Extractor) -> None:
        if not isinstance(extractor, Extractor):
            raise TypeError(f"extractor={type(extractor).__name__}: expected an Extractor, such as HOG()")
        section, left_out = as_section(extractor)
        if left_out:
            raise ValueError(
                f"extractor={type(extractor).__name__}: {left_out[0]} is no plain value, so that features can't be "
                "known again; use the extractor itself"
            )
        self.extractor, self.learns = extractor, extractor.learns
        self._made = json.dumps(section, sort_keys=True).encode()
        self._table: dict[bytes, Tensor] | None = None

    def fit_public(self, images: Tensor) -> None:
        """See :meth:`Extractor.fit_public`; nothing is learned again that this process has learned."""
        if not self.learns:
            return
        key = hashlib.sha256(self._made + b"".join(_digests(images))).digest()
        if key not in _LEARNED:
            self.extractor.fit_public(images)
            _LEARNED[key] = self.extractor.state_dict()
        self.load_state_dict(_LEARNED[key])

    def __getstate__(self) -> dict[str, Any]:
        """Pickled state: the extractor alone, without vectors, since those of private images stay in memory."""
        return {**self.__dict__, "_table": None}

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """See :meth:`Extractor.feature_size`."""
        return self.extractor.feature_size(image_shape)

    def state_dict(self) -> dict[str, Tensor]:
        """See :meth:`Extractor.state_dict`."""
        return self.extractor.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See :meth:`Extractor.load_state_dict`."""
        self.extractor.load_state_dict(state)
        self._table = None

    def __call__(self, images: Tensor) -> Tensor:
        """Features, float32 ``(n, d)``."""
        if torch.compiler.is_compiling() or not len(images):  # an exported file has to compute them
            return self.extractor(images)
        if self._table is None:
            key = hashlib.sha256(self._made)
            for name, value in self.state_dict().items():
                key.update(name.encode() + b"".join(_digests(value[None])))
            self._table = _KNOWN.setdefault(key.digest(), {})
        digests = _digests(images)
        missing = [place for place, digest in enumerate(digests) if digest not in self._table]
        if missing:
            found = self.extractor(images[missing]).cpu()
            for place, vector in zip(missing, found, strict=True):
                self._table[digests[place]] = vector.clone()
        return torch.stack([self._table[digest] for digest in digests]).to(images.device)


def _digests(images: Tensor) -> list[bytes]:
    """One digest an image, of its values and shape."""
    kind = f"{images.dtype} {tuple(images.shape[1:])}".encode()
    rows = images.detach().contiguous().cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16, key=kind).digest() for row in rows]
