# Trains your own LightningModule on the answers of a private teacher, and exports it as one file: python
# own_module.py FOLDER_OF_ARRAYS NUMBER_OF_PRIVATE_RECORDS
import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from pl_privknn import ArraysDataModule, export_run, recommend


class Student(pl.LightningModule):
    """A small network; replace it with any module."""

    def __init__(self, channels, num_classes):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(256, num_classes),
        )

    def forward(self, images):
        """From images, float32 (n, channels, height, width) in 0 … 1, to logits."""
        return self.net(images)

    def training_step(self, batch, batch_idx):
        """Cross-entropy with the teacher's answers; batch["unlabeled"] has public images without answers."""
        images, labels = batch["labeled"]
        return F.cross_entropy(self(images), labels)

    def test_step(self, batch, batch_idx):
        """Accuracy of a batch."""
        images, labels = batch
        self.log("test/accuracy", (self(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self):
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


folder, records = sys.argv[1], int(sys.argv[2])
data = ArraysDataModule(
    private_images=f"{folder}/private_images.npy",
    private_labels=f"{folder}/private_labels.npy",
    public_images=f"{folder}/public_images.npy",
    test_images=f"{folder}/test_images.npy",
    test_labels=f"{folder}/test_labels.npy",
    num_classes=3,
    class_names=["circle", "cross", "line"],
    batch_size=32,
)
found = recommend(data, epsilon=1.0, private_records=records)
_, labeling = found.build()  # the teacher, its queries and its budget; the student is your own
student = Student(data.image_shape[0], data.num_classes)
trainer = pl.Trainer(max_epochs=found.max_epochs, callbacks=[labeling], default_root_dir="runs/own_module")
trainer.fit(student, data)
trainer.test(student, data)
print(f"ε = {labeling.epsilon:.4f} at δ = {labeling.delta:g}")
print(export_run(labeling.run_dir, labeling.run_dir / "export", module=student, data=data))
