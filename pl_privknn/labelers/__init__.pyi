from .attributes import Attributes as Attributes
from .attributes import FixedThresholds as FixedThresholds
from .attributes import LearnedThresholds as LearnedThresholds
from .base import Capabilities as Capabilities
from .base import Labeler as Labeler
from .base import PrivateRecords as PrivateRecords
from .base import Release as Release
from .ind_knn.labeler import IndKNN as IndKNN
from .ind_knn.predictor import IndKNNPredictor as IndKNNPredictor
from .linear_models import PreconditionedGradients as PreconditionedGradients
from .linear_models import SufficientStatistics as SufficientStatistics
from .local import LocalReverseKNN as LocalReverseKNN
from .local import ShuffledReverseKNN as ShuffledReverseKNN
from .noisy_sgd import LinearModel as LinearModel
from .noisy_sgd import LinearOptimization as LinearOptimization
from .noisy_sgd import NoisySGDTeacher as NoisySGDTeacher
from .partitions import ClassBalancedPartition as ClassBalancedPartition
from .partitions import GuidedPartition as GuidedPartition
from .partitions import RandomPartition as RandomPartition
from .pate import PATE as PATE
from .reverse_knn import ReverseKNN as ReverseKNN
from .teachers import CNNTeachers as CNNTeachers
from .teachers import LinearTeachers as LinearTeachers
from .voting import PrivateKNN as PrivateKNN
from .voting import Screening as Screening

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
