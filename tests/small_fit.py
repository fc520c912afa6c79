"""What tests of teachers share: three easy classes of images, and a short fit."""

import pytorch_lightning as pl
import torch
from grouped import grouped

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.students import SupervisedStudent


def fit_student(folder, teacher, noise, private=300, public=60, owners=None, **labeling):
    """Fit a student for an epoch on a teacher's answers about noisy copies of three images.

    Returns:
        The callback and the data module.
    """
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(3, 1, 8, 8, generator=generator)

    def draw(n):
        labels = torch.arange(n) % 3
        return (centres[labels] + noise * torch.randn(n, 1, 8, 8, generator=generator)).clamp(0, 1), labels

    class Owned(ArraysDataModule):
        def setup(self, stage=None):
            super().setup(stage)
            self.private_groups = owners

    data = Owned(*draw(private), *draw(public), *draw(30), num_classes=3, batch_size=16)
    callback = PrivateLabeler(
        teacher,
        **grouped(
            PrivateLabeler,
            epochs_per_round=1,
            features=torch.nn.Flatten(),
            progress=False,
            **labeling,
            files={"run_dir": folder / "run"},
        ),
    )
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, default_root_dir=folder, callbacks=[callback],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(SupervisedStudent(network="small_cnn", num_classes=3, in_channels=1, image_size=8), data)
    return callback, data
