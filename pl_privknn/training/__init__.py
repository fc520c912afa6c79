"""Private training: any LightningModule on private records, by noisy SGD."""

from pl_privknn.training.noisy_sgd import FeatureHead, NoisyOptimization, NoisySGD, tanh_cnn
from pl_privknn.training.private_training import PrivateTraining
from pl_privknn.training.training_run import TrainingOptions

__all__ = [
    "FeatureHead",
    "NoisyOptimization",
    "NoisySGD",
    "PrivateTraining",
    "TrainingOptions",
    "tanh_cnn",
]
