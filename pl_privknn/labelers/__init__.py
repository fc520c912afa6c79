"""Private teachers: one file each, behind :class:`~pl_privknn.labelers.base.Labeler`."""

from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.labelers.ind_knn.labeler import IndKNN
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.labelers.multilabel.knn import MultiLabelKNN
from pl_privknn.labelers.multilabel.pate import (
    LinearAttributeTeachers,
    MultiLabelPATE,
)
from pl_privknn.labelers.multilabel.reverse_knn import MultiLabelReverseKNN
from pl_privknn.labelers.multilabel.rules import FixedThresholds, LearnedThresholds
from pl_privknn.labelers.noisy_sgd import NoisySGDTeacher
from pl_privknn.labelers.pate.aggregators import GNMAX, LNMAX, ConfidentGNMAX
from pl_privknn.labelers.pate.guided import GuidedPartition
from pl_privknn.labelers.pate.networks import CNNTeachers, LinearTeachers
from pl_privknn.labelers.pate.partition import ClassBalancedPartition, RandomPartition
from pl_privknn.labelers.pate.pate import PATE
from pl_privknn.labelers.pate.teachers import SklearnTeachers
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.labelers.private_radius import PrivateRadius
from pl_privknn.labelers.reverse_knn.reverse_knn import ReverseKNN
from pl_privknn.labelers.statistics.class_sums import ClassSums
from pl_privknn.labelers.statistics.curvature import PublicCurvature

__all__ = [
    "GNMAX",
    "LNMAX",
    "PATE",
    "CNNTeachers",
    "ClassBalancedPartition",
    "ClassSums",
    "ConfidentGNMAX",
    "FixedThresholds",
    "GuidedPartition",
    "IndKNN",
    "IndKNNPredictor",
    "Labeler",
    "LearnedThresholds",
    "LinearAttributeTeachers",
    "LinearTeachers",
    "MultiLabelKNN",
    "MultiLabelPATE",
    "MultiLabelReverseKNN",
    "NoisySGDTeacher",
    "PrivateKNN",
    "PrivateRadius",
    "PublicCurvature",
    "RandomPartition",
    "Release",
    "ReverseKNN",
    "Screening",
    "SklearnTeachers",
]
