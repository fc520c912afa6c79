"""What the tests of students share: shuffled digits, loaders, a quiet trainer."""

import torch
import torch.nn.functional as F
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from pl_privknn.students import FixMatchStudent, SupervisedStudent, UDAStudent, VATStudent
from tests.setup.small_fit import quiet_trainer

trainer = quiet_trainer
STUDENTS = [SupervisedStudent, VATStudent, UDAStudent, FixMatchStudent]


def loaders(digits, labeled=64, unlabeled=256, batch=32, soft=False):
    images, labels = digits
    targets = F.one_hot(labels, 10).float() if soft else labels
    return CombinedLoader(
        {
            "labeled": DataLoader(TensorDataset(images[:labeled], targets[:labeled]), batch),
            "unlabeled": DataLoader(TensorDataset(images[:unlabeled]), 2 * batch),
        },
        "max_size_cycle",
    )


def held_out(digits):
    return DataLoader(TensorDataset(digits[0][1000:], digits[1][1000:]), 256)


def shuffled_digits():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return images[order], torch.tensor(bunch.target)[order]
