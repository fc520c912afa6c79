import pytest
import torch

from pl_privknn.students import StrongAugmentation, WeakAugmentation

FULL = StrongAugmentation(magnitude=1.0, cutout=0.5, shift=0.125)
AUGMENTATIONS = [
    WeakAugmentation(shift=0.125),
    WeakAugmentation(shift=0.125, cutout=0.3),
    FULL,
    StrongAugmentation(cutout=0),
]


def each(function, images, values):
    return torch.stack([function(image, value.item()) for image, value in zip(images, values, strict=True)])


@pytest.mark.parametrize("augmentation", [*AUGMENTATIONS, StrongAugmentation(num_ops=6, fill=1.0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_example_gets_its_own_draw_and_pixels_stay_in_range(augmentation, channels):
    image = (torch.rand(1, channels, 9, 13) * 3 - 1).clamp(0, 1)
    copies = image.expand(64, channels, 9, 13).contiguous()
    results = augmentation(copies)
    # Nine shifts are possible for the weak one, each taken by some of 64 copies (below 1e-2).
    assert len(torch.unique(results.flatten(1), dim=0)) >= 9
    assert torch.equal(copies, image.expand_as(copies))  # the input stays as it was
    assert (results.shape, results.dtype) == (copies.shape, torch.float32)
    assert (results.min() >= 0) & (results.max() <= 1)


def test_nothing_mirrors_unless_asked():
    # Three spots, one a channel, with room around them: only mirroring changes the sense of their rotation.
    spots = torch.zeros(1, 3, 80, 80)
    for channel, (row, column) in enumerate([(30, 36), (40, 46), (48, 34)]):
        spots[0, channel, row : row + 3, column : column + 3] = 1.0
    batch = spots.expand(500, 3, 80, 80)

    def clockwise(images):
        weight = images / images.sum(dim=(2, 3), keepdim=True)
        x = (weight.sum(dim=2) * torch.arange(80.0)).sum(dim=2)
        y = (weight.sum(dim=3) * torch.arange(80.0)).sum(dim=2)
        ax, ay, bx, by = x[:, 1] - x[:, 0], y[:, 1] - y[:, 0], x[:, 2] - x[:, 0], y[:, 2] - y[:, 0]
        return ax * by - ay * bx > 0

    assert clockwise(batch).all()
    assert clockwise(WeakAugmentation(shift=0.125)(batch)).all()
    assert clockwise(StrongAugmentation(num_ops=1, magnitude=1, cutout=0)(batch)).all()
    # 500 fair coins: outside [200, 300] with probability below 1e-5.
    assert 200 < int(clockwise(WeakAugmentation(flip=True)(batch)).sum()) < 300


def test_a_weak_view_loses_a_square_about_any_pixel():
    images = torch.rand(20_000, 1, 6, 7).clamp(0.01, 0.99)
    views = WeakAugmentation(shift=0, cutout=3 / 7, cutout_fill=0.0)(images)
    assert torch.equal(views[views != 0], images[views != 0])
    cut = (views == 0).flatten(1).double()
    # Literal squares of 3 pixels, clipped at the borders, about each of the 42 pixels.
    squares = torch.zeros(42, 6, 7, dtype=torch.float64)
    for number in range(42):
        row, column = divmod(number, 7)
        squares[number, max(0, row - 1) : row + 2, max(0, column - 1) : column + 2] = 1
    matches = (cut[:, None] == squares.flatten(1)).all(dim=2)
    assert bool(matches.any(dim=1).all())
    # 42 equally likely places: chi-square with 41 degrees of freedom passes 93 less than once in 1e5.
    counts = matches.double().sum(dim=0)
    assert ((counts - 20_000 / 42) ** 2 / (20_000 / 42)).sum() < 93
