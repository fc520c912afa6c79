"""A comparison on images that users bring as arrays, from the shipped file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compare_setup import compare, own_folder  # noqa: F401

from pl_privknn.comparison.spec import read_comparison
from pl_privknn.datamodules import DigitsDataModule

CONFIG = Path(__file__).parents[2] / "configs" / "compare_arrays.yaml"


@pytest.fixture
def arrays(own_folder, tmp_path):  # noqa: F811
    data = DigitsDataModule(num_private=400, num_public=200)
    data.prepare_data()
    for stage in ("fit", "test"):
        data.setup(stage)

    def pixels(part):
        return (part.images() * 255).round().to(torch.uint8).numpy()

    np.savez(
        tmp_path / "mine.npz", private_images=pixels(data.private), private_labels=data.private.labels,
        public_images=pixels(data.public), public_truth=data.public.truth, test_images=pixels(data.test),
        test_labels=data.test.labels,
    )  # fmt: skip
    return tmp_path / "mine.npz"


def test_definitions_say_what_the_data_is(arrays):
    given = {
        "definitions.arrays": str(arrays),
        "definitions.records": 400,
        "base.data.init_args.batch_size": 32,
    }
    comparison = read_comparison(CONFIG, given)
    told = comparison.base["data"]["init_args"]
    assert {told[name] for name in told if name.endswith(("images", "labels", "truth"))} == {str(arrays)}
    assert (told["num_classes"], told["batch_size"]) == (10, 32)
    teacher, *_, baseline, _ = comparison.methods
    assert teacher.labeling["labeler"]["init_args"]["expected_records"] == 400
    assert baseline.model["init_args"]["expected_records"] == 400
    assert baseline.model["init_args"]["extractor"] == comparison.base["student"]["init_args"]["extractor"]
