"""The student that learns from labels alone: the measure for all others."""

from __future__ import annotations

from torch import Tensor

from pl_privknn.students.base import Student


class SupervisedStudent(Student):
    """Trains on labelled images and ignores unlabelled ones. Arguments are those of :class:`Student`."""

    def objective(self, x: Tensor, y: Tensor, unlabeled: Tensor | None = None) -> dict[str, Tensor]:
        """The loss on labels."""
        return {"supervised": self.label_loss(self.logits(x), y)}
