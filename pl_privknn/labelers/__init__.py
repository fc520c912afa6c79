"""Private teachers: one file each, behind :class:`~pl_privknn.labelers.base.Labeler`."""

from pl_privknn.labelers.attributes import Attributes, FixedThresholds, LearnedThresholds
from pl_privknn.labelers.base import Capabilities, Labeler, PrivateRecords, Release
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.local import LocalReverseKNN, ShuffledReverseKNN
from pl_privknn.labelers.noisy_sgd import LinearModel, LinearOptimization, NoisySGDTeacher
from pl_privknn.labelers.partitions import ClassBalancedPartition, GuidedPartition, RandomPartition
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.released_sums import PreconditionedGradients, SufficientStatistics
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.labelers.teachers import CNNTeachers, LinearTeachers
from pl_privknn.labelers.voting import PrivateKNN, Screening

__all__ = [
    "PATE",
    "Attributes",
    "CNNTeachers",
    "Capabilities",
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
