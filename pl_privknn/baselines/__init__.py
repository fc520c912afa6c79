"""Private training to compare the labelling teachers with: noisy SGD on the private records themselves."""

from pl_privknn.baselines.heads import FeatureHead
from pl_privknn.baselines.networks import tanh_cnn
from pl_privknn.baselines.noisy_sgd import NoisySGD
from pl_privknn.baselines.updates import NoisyOptimization
from pl_privknn.privacy.settings import RunFiles
from pl_privknn.training.settings import Clipping, PoissonBatches, TrainingBudget

__all__ = [
    "Clipping",
    "FeatureHead",
    "NoisyOptimization",
    "NoisySGD",
    "PoissonBatches",
    "RunFiles",
    "TrainingBudget",
    "tanh_cnn",
]
