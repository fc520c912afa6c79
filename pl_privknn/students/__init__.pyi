from .augment import StrongAugmentation as StrongAugmentation
from .augment import WeakAugmentation as WeakAugmentation
from .base import (
    Student as Student,
)
from .base import (
    StudentOptimization as StudentOptimization,
)
from .base import (
    SupervisedStudent as SupervisedStudent,
)
from .consistency import FixMatchStudent as FixMatchStudent
from .consistency import UDAStudent as UDAStudent
from .losses import LabelLoss as LabelLoss
from .pretraining import SimCLRStudent as SimCLRStudent
from .vat import VATStudent as VATStudent

__all__ = [
    "FixMatchStudent",
    "LabelLoss",
    "SimCLRStudent",
    "StrongAugmentation",
    "Student",
    "StudentOptimization",
    "SupervisedStudent",
    "UDAStudent",
    "VATStudent",
    "WeakAugmentation",
]
