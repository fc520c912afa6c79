from .noisy_sgd import FeatureHead as FeatureHead
from .noisy_sgd import NoisyOptimization as NoisyOptimization
from .noisy_sgd import NoisySGD as NoisySGD
from .noisy_sgd import tanh_cnn as tanh_cnn
from .private_training import PrivateTraining as PrivateTraining
from .training_run import TrainingOptions as TrainingOptions

__all__ = ["FeatureHead", "NoisyOptimization", "NoisySGD", "PrivateTraining", "TrainingOptions", "tanh_cnn"]
