# %% [markdown]
# # A LightningModule of your own
#
# One callback, `PrivateTraining`, trains an ordinary LightningModule on the private records by noisy SGD. The module
# contains no code for privacy. Run it with `python docs/guides/gallery/own_lightning_module.py`, or cell by cell in
# an editor that supports `# %%`.

# %%
import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from pl_privknn import Budget, DigitsDataModule, PrivateTraining

pl.seed_everything(0)


class Digits(pl.LightningModule):
    """Two layers; replace it with any module."""

    def __init__(self, lr=0.5):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 10))
        self.lr = lr

    def forward(self, x):
        """Logits."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Cross-entropy of a batch."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch, batch_idx):
        """Accuracy of a batch."""
        x, y = batch
        self.log("test/accuracy", (self(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        """SGD; the callback adds clipping and noise."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


# %% [markdown]
# `private_records` is an estimate that may be published; the exact number of private records is private. The noise is
# computed from ε. Each record's gradient is clipped to `max_grad_norm`.

# %%
private = PrivateTraining(
    Budget(epsilon=2.0), max_grad_norm=1.0, expected_batch_size=250, private_records=1000
)
trainer = pl.Trainer(
    max_epochs=10,
    accelerator="cpu",
    callbacks=[private],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="runs/own_module",
)
data = DigitsDataModule()
model = Digits()
trainer.fit(model, data)
(figures,) = trainer.test(model, datamodule=data, verbose=False)

# %%
accuracy, epsilon = figures["test/accuracy"], private.epsilon
print(f"test accuracy {accuracy:.3f} at ε = {epsilon:.4f}, δ = {private.delta:g}")

# %% [markdown]
# What the module says of digits of the test set; wrong answers are red:

# %%
chosen = torch.randperm(len(data.test))[:12]
images, truth = data.test.images(chosen), data.test.labels[chosen]
with torch.no_grad():
    answers = model(images).argmax(dim=1)
figure, axes = plt.subplots(2, 6, figsize=(9, 3.4))
for place, image, answer, label in zip(axes.flat, images, answers, truth, strict=True):
    place.imshow(image[0], cmap="gray_r")
    place.set_title(str(int(answer)), color="black" if answer == label else "red")
    place.axis("off")
figure.savefig("own_lightning_module.png")
