"""Private training: any LightningModule on private records, by noisy SGD."""

from pl_privknn.training.adaptive_clipping import AdaptiveClipping
from pl_privknn.training.correlated_noise import BandedNoise
from pl_privknn.training.paid_accuracy import PaidAccuracy
from pl_privknn.training.privacy_groups import PrivacyGroups
from pl_privknn.training.private_training import PrivateTraining

__all__ = ["AdaptiveClipping", "BandedNoise", "PaidAccuracy", "PrivacyGroups", "PrivateTraining"]
