"""Private training: any LightningModule on private records, by noisy SGD."""

from pl_privknn.training.private_training import PrivateTraining

__all__ = ["PrivateTraining"]
