"""What the tests of private training share: a module that nobody shaped for it, and a fit of it."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from pl_privknn import PrivateTraining
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.grouped import grouped
from tests.training.noisy_sgd_setup import PRIVATE, make_data, make_trainer


class Lit(pl.LightningModule):
    """A module as the documentation of Lightning shows them: it logs its training loss and accuracy."""

    def __init__(self, net=None, lr=0.5):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2)]
        self.net = nn.Sequential(*layers) if net is None else net
        self.accuracy, self.lr = MulticlassAccuracy(2), lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_accuracy": self.accuracy}, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def clipped_gradient(module, x, y, norm):
    """The gradient of one loss in double precision, scaled to a norm at most."""
    gradients = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
    flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
    return flat * min(1.0, norm / float(flat.norm()))


def literal_update(module, data, clip_norm, divisor, of=lambda x: x[None], chosen=None):
    """Weights after a gradient step on the private part: each example's gradient clipped by itself."""
    data.setup("fit")
    places = range(len(data.private)) if chosen is None else chosen
    examples = ((of(x), y) for x, y in (data.private[place] for place in places))
    total = sum(clipped_gradient(module, x, torch.tensor([y] * len(x)), clip_norm) for x, y in examples)
    return weights(module) - module.lr * total / divisor


def training(**kwargs):
    options = {"expected_batch_size": 30, "private_records": PRIVATE, "noise_source": SeededNoise(1)}
    if "epsilon" not in kwargs:
        options["noise_multiplier"] = 1.0
    return PrivateTraining(**grouped(PrivateTraining, **{**options, **kwargs}))


def fit(module, folder, callback=None, epochs=2, data=None, ckpt_path=None, callbacks=(), **kwargs):
    callback = callback or training()
    trainer = make_trainer(folder, epochs, callbacks=[callback, *callbacks], **kwargs)
    trainer.fit(module, data or make_data(), ckpt_path=ckpt_path)
    return callback, trainer


class Silent(SeededNoise):
    """Coins, and noise of zero."""

    def stream(self, *key):
        child = super().stream(*key)
        child.__class__ = Silent
        return child

    def normal(self, shape, scale):
        return torch.zeros(shape, dtype=torch.float64)
