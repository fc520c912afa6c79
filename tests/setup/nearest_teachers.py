"""PATE teachers that one record decides."""

from typing import Any

import torch
from torch import Tensor

from pl_privknn.labelers.teachers import Teachers, TrainedTeachers


class NearestTeachers(Teachers):
    """Teachers that answer with the label of their nearest record, so one record decides nearby answers."""

    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: Any,
    ) -> TrainedTeachers:
        """See :meth:`~pl_privknn.labelers.teachers.Teachers.train`."""
        empty = torch.bincount(parts, minlength=num_teachers) == 0
        return _Nearest(empty, features, labels, parts)


class _Nearest(TrainedTeachers):
    def __init__(self, empty: Tensor, features: Tensor, labels: Tensor, parts: Tensor) -> None:
        super().__init__(empty, torch.zeros_like(empty))
        self._features, self._labels, self._parts = features, labels, parts

    def predict(self, queries: Tensor) -> Tensor:
        """See the base."""
        distances = torch.cdist(queries.double(), self._features.double())
        votes = torch.full((len(queries), self.num_teachers), -1)
        for teacher in torch.nonzero(~self.empty).flatten():
            nearest = torch.where(self._parts == teacher, distances, torch.inf).argmin(dim=1)
            votes[:, teacher] = self._labels[nearest]
        return votes
