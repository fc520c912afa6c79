"""Private teachers: one file each, behind :class:`~pl_privknn.labelers.base.Labeler`."""

from pl_privknn.labelers.attributes import Attributes, FixedThresholds, LearnedThresholds
from pl_privknn.labelers.base import Labeler, PrivateRecords, Release
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.noisy_sgd import LinearModel, LinearOptimization, NoisySGDTeacher
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.pate_training import (
    ClassBalancedPartition,
    CNNTeachers,
    GuidedPartition,
    LinearTeachers,
    RandomPartition,
)
from pl_privknn.labelers.preconditioned_gradients import PreconditionedGradients
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.labelers.reverse_knn_clients import LocalReverseKNN, ShuffledReverseKNN
from pl_privknn.labelers.sufficient_statistics import SufficientStatistics

__all__ = [
    "PATE",
    "Attributes",
    "CNNTeachers",
    "ClassBalancedPartition",
    "FixedThresholds",
    "GuidedPartition",
    "IndKNN",
    "IndKNNPredictor",
    "Labeler",
    "LearnedThresholds",
    "LinearModel",
    "LinearOptimization",
    "LinearTeachers",
    "LocalReverseKNN",
    "NoisySGDTeacher",
    "PreconditionedGradients",
    "PrivateKNN",
    "PrivateRecords",
    "RandomPartition",
    "Release",
    "ReverseKNN",
    "Screening",
    "ShuffledReverseKNN",
    "SufficientStatistics",
]
