import torch

from pl_privknn.features import HOG, JoinedFeatures, Pixels
from tests.setup.refusals import refusals


def test_squared_distances_add_up_by_weight():
    images = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    parts = [HOG(), Pixels()]
    joined = JoinedFeatures(parts, weights=[2.0, 0.5])(images)
    expected = sum(
        weight * torch.cdist(unit, unit) ** 2
        for weight, unit in zip(
            (2.0, 0.5), [torch.nn.functional.normalize(part(images)) for part in parts], strict=True
        )
    )
    torch.testing.assert_close(torch.cdist(joined, joined) ** 2, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(JoinedFeatures(parts, weights=[2.0, 0.5])(images[2:3])[0], joined[2])


test_bad_arguments_are_named = refusals(
    {
        "extractors": lambda: JoinedFeatures([]),
        "weights=.*1.0, 2": lambda: JoinedFeatures([HOG()], [1.0, 2.0]),
        "weights=0": lambda: JoinedFeatures([HOG()], [0.0]),
    }
)
