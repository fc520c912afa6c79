"""Estimated time and memory of a recommended run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pl_privknn.recommendation import Recommendation

_EXAMPLES = 16  # of the timing trial
_START, _STEP = 9.0, 0.003  # seconds for imports, plan and files, and for one step of a student on features
_RECORD = 7e-5  # seconds per vector for reading, kernel and teacher
_LIBRARIES, _NETWORK = 1.1, 0.7  # gigabytes of torch and Lightning, and of a network on images


def cost_line(found: Recommendation, runs: int = 1) -> str:
    """Sentence with the estimated time and memory of a run, or of several such runs in sequence."""
    from pl_privknn.datamodules import ImageFolderDataModule

    seconds, gigabytes = cost_of(found)
    seconds *= runs
    span = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    files = (
        isinstance(found.data, ImageFolderDataModule) and not {"public", "test"} & found.data.places.keys()
    )
    return (
        f"Cost: about {span} on this machine's CPU when it is idle, and {gigabytes:.1f} GB of memory"
        f"{', plus the decoding of image files' if files else ''}."
    )


def cost_of(found: Recommendation) -> tuple[float, float]:
    """Estimated seconds and gigabytes of a run, from its public sizes and a trial on synthetic and public examples.

    Time and memory of this process are not used, since they depend on the private labels that were read.
    """
    import torch

    from pl_privknn.datamodules import ImageFolderDataModule, TextDataModule
    from pl_privknn.datamodules.folder import FileImages, images_under
    from pl_privknn.features import PublicFeatures, WordLlamaFeatures
    from pl_privknn.features.base import Extractor

    data, sizes = found.data, found.sizes
    extractor = found.build(data)[1].features[0]
    assert isinstance(extractor, Extractor)
    images = torch.rand(_EXAMPLES, *data.image_shape)
    if extractor.learns:  # its underlying extractors, which learn from fewer examples
        extractor = PublicFeatures(4)
        extractor.fit_public(images)
    width = max(extractor(images).shape[1], found.setting.width)  # the first call loads weights
    each = _seconds(lambda: extractor(images))
    if isinstance(data, TextDataModule) and not data.holds_vectors:
        embed = WordLlamaFeatures()
        embed(["word"])
        each += _seconds(lambda: embed(["word " * 300] * _EXAMPLES))
    seconds = _START + _STEP * found.max_epochs * (sizes.public // 32 + 1)
    # Features are computed once: of private records, public examples and test examples.
    count = sizes.private_records + sizes.public + len(data.test)
    if isinstance(data, ImageFolderDataModule):
        files = [
            path
            for part in ("public", "test")
            if part in data.places
            for path in images_under(data.places[part])
        ]
        store = FileImages((files * _EXAMPLES)[:_EXAMPLES], data.image_shape, cache=False)
        with contextlib.suppress(ValueError):  # a damaged file, which a run leaves out
            seconds += count * _seconds(lambda: store.read(torch.arange(len(store))))
    # Vectors are kept as float32 unless their file is mapped, images as uint8, features as float32.
    base, size = (_LIBRARIES, 4) if data.image_shape[1:] == (1, 1) else (_LIBRARIES + _NETWORK, 1)
    size *= not sizes.public or data.public.store.in_memory
    return seconds + count * (each + _RECORD), base + 1e-9 * count * (size * images[0].numel() + 4 * width)


def _seconds(call: Callable[[], object]) -> float:
    """Processor seconds of this thread per example of a call, independent of other load."""
    started = time.thread_time()
    call()
    return (time.thread_time() - started) / _EXAMPLES
