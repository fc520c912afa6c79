"""Similarities of an image's patches to a dictionary of public patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pl_privknn._checks import check_int, shape_text
from pl_privknn.features.base import LearnedExtractor, check_images

# So many activations at a time stay in a processor's cache, and fit an accelerator's memory.
_VALUES_AT_A_TIME = {"cpu": 1 << 19}
_VALUES_ON_ACCELERATORS = 1 << 28
# Added to a patch's variance before it is divided by its root, and to the variances of the whitening.
_CONTRAST, _WHITENING = 0.01, 0.05
_PASSES, _AT_ONCE = 5, 4096  # of mini-batch k-means: over all patches, and patches in a batch


class PatchDictionary(LearnedExtractor):
    """Triangle activations of whitened patches (Coates, Ng, Lee 2011), averaged over a grid, an Extractor.

    Patches of public images are normalised in contrast and whitened (ZCA), and clustered by mini-batch k-means. Of
    an image, the patch about each pixel is treated likewise; its activation for a centre is max(0, mean distance to
    all centres − distance to this one). The means of each activation over the cells of a grid are the features.

    Args:
        patch_size: side of a patch in pixels; images are padded with zeros.
        centers: size of the dictionary.
        grid: cells in a row, and in a column.
        patches: public patches to learn from; all of them where there are fewer.
        seed: of the choice of patches and of k-means, a public matter.

    Raises:
        ValueError: for arguments out of range.
    """

    def __init__(
        self,
        patch_size: int = 6,
        centers: int = 400,
        grid: int = 4,
        patches: int = 20_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.patch_size = check_int("patch_size", patch_size, 2)
        self.centers = check_int("centers", centers, 2)
        self.grid = check_int("grid", grid)
        self.patches = check_int("patches", patches)
        self.seed = check_int("seed", seed, 0, 2**32 - 1)

    def feature_size(self, image_shape: Sequence[int]) -> int:
        """``grid² · centers``."""
        return self.grid**2 * self.centers

    def learn(self, images: Tensor) -> dict[str, Tensor]:
        """Whitening and centres.

        Raises:
            ValueError: for images smaller than a patch, or fewer patches than centres.
        """
        from sklearn.cluster import MiniBatchKMeans

        side = self.patch_size
        down, across = images.shape[2] - side + 1, images.shape[3] - side + 1
        count = len(images) * down * across if min(down, across) > 0 else 0
        if count < self.centers:
            raise ValueError(
                f"images: shape {tuple(images.shape)} has {count} patches of {side} x {side} pixels, fewer than "
                f"centers={self.centers}; give more public images, or take smaller patches or a smaller dictionary"
            )
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(count, generator=generator)[: self.patches]
        windows = images.cpu().float().unfold(2, side, 1).unfold(3, side, 1)
        place = chosen % (down * across)
        rows = windows[chosen // (down * across), :, place // across, place % across].flatten(1)
        rows = _normalized(rows)
        mean = rows.mean(dim=0)
        centred = (rows - mean).double()
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(rows))
        scales = (variances.clamp_min(0) + _WHITENING).rsqrt()
        whitening = ((directions * scales) @ directions.T).float()
        white = (rows - mean) @ whitening
        kmeans = MiniBatchKMeans(
            self.centers, n_init=1, max_iter=_PASSES, batch_size=_AT_ONCE, random_state=self.seed
        )
        centers = torch.from_numpy(kmeans.fit(white.numpy()).cluster_centers_).float()
        return {"mean": mean, "whitening": whitening, "centers": centers}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features of images, float32 ``(n, grid² · centers)`` on their device: cell row, cell column, centre.

        Raises:
            RuntimeError: before :meth:`fit_public`.
            ValueError: for images of another shape than the public ones, or smaller than the grid.
        """
        check_images(images)
        device = images.device
        mean, whitening, centers = (self.learned(name, device) for name in ("mean", "whitening", "centers"))
        channels, height, width = images.shape[1:]
        if channels * self.patch_size**2 != len(mean) or min(height, width) < self.grid:
            raise ValueError(
                f"images: shape {shape_text(images.shape)}; expected as many channels as the public images and at "
                f"least grid={self.grid} pixels a side"
            )
        before = self.patch_size // 2
        after = self.patch_size - 1 - before
        pool = _pooling(height, width, self.grid, device)
        # |w|² + |c|² − 2 w·c as one product, in memory that is used again: passes over memory take the time.
        lengths = centers.square().sum(dim=1, keepdim=True)
        others = torch.cat([-2 * centers, torch.ones_like(lengths), lengths], dim=1).T.contiguous()
        features = torch.empty((len(images), self.grid**2 * self.centers), device=device)
        most = _VALUES_AT_A_TIME.get(device.type, _VALUES_ON_ACCELERATORS)
        step = min(max(1, most // (height * width * self.centers)), max(1, len(images)))
        memory = torch.empty((step * height * width, self.centers), device=device)
        for start in range(0, len(images), step):
            part = functional.pad(images[start : start + step].float(), (before, after, before, after))
            windows = part.unfold(2, self.patch_size, 1).unfold(3, self.patch_size, 1)
            rows = windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, len(mean))
            white = (_normalized(rows) - mean) @ whitening
            length = white.square().sum(dim=1, keepdim=True)
            distances = memory[: len(rows)]
            torch.mm(torch.cat([white, length, torch.ones_like(length)], dim=1), others, out=distances)
            distances.clamp_(min=0).sqrt_()
            torch.sub(distances.mean(dim=1, keepdim=True), distances, out=distances).clamp_(min=0)
            cells = pool @ distances.view(len(part), height * width, self.centers)
            features[start : start + step] = cells.flatten(1)
        return features


def _normalized(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(dim=1, keepdim=True)
    return centred * (centred.square().mean(dim=1, keepdim=True) + _CONTRAST).rsqrt()


def _pooling(height: int, width: int, grid: int, device: torch.device) -> Tensor:
    """The averages over cells as a matrix, shape ``(grid², height · width)``."""
    pixels = torch.eye(height * width, device=device).view(-1, 1, height, width)
    return functional.adaptive_avg_pool2d(pixels, grid).flatten(1).T.contiguous()
