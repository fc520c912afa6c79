"""Students: LightningModules that learn from public images and released labels."""

from pl_privknn.students.augment import StrongAugmentation, WeakAugmentation
from pl_privknn.students.base import Student, StudentOptimization, SupervisedStudent
from pl_privknn.students.consistency import FixMatchStudent, UDAStudent
from pl_privknn.students.losses import LabelLoss
from pl_privknn.students.pretraining import SimCLRStudent
from pl_privknn.students.vat import VATStudent

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
