"""Private teachers: one file each, behind :class:`~pl_privknn.labelers.base.Labeler`."""

from pl_privknn.labelers.aggregators import GNMAX, LNMAX, ConfidentGNMAX
from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.labelers.ind_knn import IndKNN
from pl_privknn.labelers.ind_knn_predictor import IndKNNPredictor
from pl_privknn.labelers.multilabel_knn import MultiLabelKNN
from pl_privknn.labelers.multilabel_pate import (
    LinearAttributeTeachers,
    MLPAttributeTeachers,
    MultiLabelPATE,
)
from pl_privknn.labelers.multilabel_reverse_knn import MultiLabelReverseKNN
from pl_privknn.labelers.multilabel_rules import FixedThresholds, LearnedThresholds
from pl_privknn.labelers.noisy_sgd import NoisySGDTeacher
from pl_privknn.labelers.pate import PATE
from pl_privknn.labelers.pate_guided import GuidedPartition
from pl_privknn.labelers.pate_networks import CNNTeachers, LinearTeachers, MLPTeachers
from pl_privknn.labelers.pate_partition import ClassBalancedPartition, RandomPartition, ShufflePartition
from pl_privknn.labelers.pate_teachers import SklearnTeachers
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.labelers.reverse_knn import ReverseKNN

__all__ = [
    "GNMAX",
    "LNMAX",
    "PATE",
    "CNNTeachers",
    "ClassBalancedPartition",
    "ConfidentGNMAX",
    "FixedThresholds",
    "GuidedPartition",
    "IndKNN",
    "IndKNNPredictor",
    "Labeler",
    "LearnedThresholds",
    "LinearAttributeTeachers",
    "LinearTeachers",
    "MLPAttributeTeachers",
    "MLPTeachers",
    "MultiLabelKNN",
    "MultiLabelPATE",
    "MultiLabelReverseKNN",
    "NoisySGDTeacher",
    "PrivateKNN",
    "RandomPartition",
    "Release",
    "ReverseKNN",
    "Screening",
    "ShufflePartition",
    "SklearnTeachers",
]
