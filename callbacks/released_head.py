"""The head: the model that a teacher's releases make, saved and evaluated beside the student that learned from it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from pl_privknn._files import write_durably
from pl_privknn.features.backbone import BackboneFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.labelers.base import Labeler, MakesModel
from pl_privknn.labelers.statistics import TARGETS
from pl_privknn.students.losses import TASKS

#: The file in a run's folder.
HEAD = "head.pt"
#: What a run may release as its model; ``"mean"`` averages the probabilities of student and head.
MODELS = ("student", "head", "mean")


class ReleasedHead(nn.Module):
    """Images to probabilities by a teacher's releases: as private as these, whoever uses it how often.

    Args:
        labeler: of the class and the settings that released.
        extractor: of the class and the settings that made the features.
        state: what :func:`save_head` wrote.
    """

    def __init__(
        self, labeler: Labeler, extractor: Callable[[Tensor], Tensor], state: dict[str, dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self._extractor = extractor
        if isinstance(extractor, Extractor) and extractor.learns:
            # The run's own goes on learning in later rounds.
            self._extractor = copy.deepcopy(extractor)
            self._extractor.load_state_dict(state["extractor"])
        if not isinstance(labeler, MakesModel):
            raise TypeError(f"labeler={type(labeler).__name__} makes no model of its releases")
        self._predict = labeler.head(state["head"])

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Probabilities of images, of classes or attributes, float32 ``(n, c)`` on the CPU."""
        return self._predict(self._extractor(images.cpu()).cpu()).float()


def save_head(folder: Path, labeler: Labeler, extractor: Callable[[Tensor], Tensor]) -> None:
    """Write the head into a run's folder, where the releases make one of lasting features; all of it is public."""
    head = labeler.head_state() if isinstance(labeler, MakesModel) else None
    if head is None or _of_student(extractor):
        return
    learned = extractor.state_dict() if isinstance(extractor, Extractor) else {}
    buffer = io.BytesIO()
    torch.save({"head": head, "extractor": learned}, buffer)
    write_durably(folder / HEAD, buffer.getvalue())


def load_head(folder: Path, labeler: Labeler, extractor: Callable[[Tensor], Tensor]) -> ReleasedHead | None:
    """The head in a run's folder; None where there is none."""
    path = folder / HEAD
    if not path.is_file():
        return None
    return ReleasedHead(labeler, extractor, torch.load(path, map_location="cpu", weights_only=True))


def _of_student(extractor: Callable[[Tensor], Tensor]) -> bool:
    """Whether a student's backbone is part of the features: it goes on learning, and they are gone."""
    if type(extractor) is BackboneFeatures:
        return True
    return any(_of_student(part) for part in getattr(extractor, "extractors", ()))


class Judged:
    """What share of test labels each model gets right; of attributes, the mean of their shares.

    Args:
        head: the teacher's model.
        task: ``"multiclass"`` or ``"multilabel"``.
    """

    def __init__(self, head: ReleasedHead, task: str) -> None:
        self.head = head
        self._outputs, self._targets = TASKS[task], TARGETS[task]
        self._right: dict[str, Tensor] = {}
        self._known = torch.zeros(1)

    @torch.no_grad()
    def add(self, student: nn.Module, images: Tensor, labels: Tensor) -> None:
        """A batch of test images, with int64 labels ``(n,)``, or attributes ``(n, a)``; -1 where unknown."""
        head = self.head(images)
        mean = (head + self._outputs.probabilities(student(images)).cpu()) / 2
        labels = labels.cpu()
        known = labels >= 0
        for name, probabilities in (("head", head), ("mean", mean)):
            right = (self._targets.answers(probabilities) == labels) & known
            self._right[name] = self._right.get(name, 0) + right.sum(dim=0)
        self._known = self._known + known.sum(dim=0)

    def accuracies(self, student: float | None) -> dict[str, float | None]:
        """Accuracy of each of :data:`MODELS`, given the student's."""
        if not self._known.any():
            return dict.fromkeys(MODELS)
        shares = {name: (n.double() / self._known).nanmean() for name, n in self._right.items()}
        return {"student": student, **{name: round(float(share), 6) for name, share in shares.items()}}
