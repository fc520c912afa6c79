"""Rules of the recommendation: teacher, width of features and centre by ε and sizes, and their configuration.

:mod:`pl_privknn.recommendation.recommend` describes the rules and their source. :func:`compare` simulates candidates
on labelled public examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pl_privknn._checks import counted
from pl_privknn.callbacks.labeling_arguments import LabelingOptions
from pl_privknn.callbacks.selection import ClusterSelection, FullSelection, PublicPool, label_by_spread
from pl_privknn.config import plain_arguments
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features.base import Extractor
from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.features.public import PublicFeatures, PublicKernelPCA, PublicPCA, has_pretrained
from pl_privknn.features.table import TableFeatures
from pl_privknn.labelers.base import Labeler
from pl_privknn.labelers.linear_models import PreconditionedGradients, SufficientStatistics
from pl_privknn.labelers.reverse_knn import ReverseKNN
from pl_privknn.privacy.budget import Budget
from pl_privknn.privacy.ledger import FreeLedger
from pl_privknn.privacy.mechanisms.base import Unit
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.students.losses import TASKS

#: Teachers that are recommended, and their names in texts.
TEACHERS = {"ReverseKNN": "reverse kNN", "PreconditionedGradients": "released gradients"}
#: Feature widths, each with the n ε up to which it is used.
Widths = tuple[tuple[int, float], ...]


class Rule(NamedTuple):
    """Measured rules of one kind of examples, by n private records, ε and C classes.

    Attributes:
        ratio: n ε / C up to which votes may be used.
        most: n ε up to which they may, whatever C: more classes make clusters of public examples impure.
        votes: feature widths of ReverseKNN. A few clusters can't use wide features.
        gradients: feature widths of PreconditionedGradients, whose noise is in every component and class.
    """

    ratio: float
    most: float
    votes: Widths
    gradients: Widths


#: Rules by kind of examples: images; vectors, and images of more than :data:`FEW` classes; rows of tables, whose
#: features are fewer and cleaner; attributes; images whose public examples are of another kind.
RULES = {
    "images": Rule(200, 2_000, ((30, 400), (100, math.inf)), ((30, 1_900), (100, 10_000), (300, math.inf))),
    "vectors": Rule(
        200,
        900,
        ((16, 1_000), (30, math.inf)),
        ((16, 1_000), (30, 4_000), (60, 10_000), (100, 40_000), (300, math.inf)),
    ),
    "table": Rule(40, math.inf, ((16, 400), (30, math.inf)), ((30, 1_000), (100, 10_000), (300, math.inf))),
    "attributes": Rule(0, 0, (), ((16, 700), (30, 1_900), (100, 10_000), (300, math.inf))),
    "shifted": Rule(0, 0, (), ((30, 700), (100, 10_000), (300, math.inf))),
}
#: Most classes of images that have a rule of their own.
FEW = 15
# Above so many classes widths go by n ε times their share, since the noise of each class is the same (62 and 100
# classes at n ε of 7,000: 60 and 30 components are best).
_MOST_CLASSES = 40
#: Kinds of public examples, relative to private ones.
KINDS = ("same", "other")
#: What the choice of a teacher goes by; the second where rare classes count as much as large ones.
METRICS = ("accuracy", "balanced_accuracy")
# Share of μ for a centre; the norm of its noise (feature vectors have norm 1) above which it is left out or, where
# public examples are of another kind, takes a larger share.
_CENTRE_SHARE, _CENTRE_NOISE, _LARGER_CENTRE_SHARE = 0.2, 0.4, 0.4
# Number of gradient releases then: ten instead of six gain 0.8 points on average between MNIST and digits, both ways
# (1,000 records, ε 0.5 and 1, widths 30, 60 and 100, four seeds).
_RELEASES_OF_SHIFTED = 10
# The noise of a vote has a standard deviation of √2/ε, well below clusters of 10/ε records; fewer than six public
# examples do not locate a cluster.
_VOTES_A_CLUSTER, _PUBLIC_A_CLUSTER = 10.0, 6
#: Kernel features of released gradients: input principal components, whitening power of its own components, and
# largest number of landmarks among public examples.
BENEATH, _POWER, _LANDMARKS = 100, 0.4, 2_000
# γ of rows of a table, whose features have a median distance of 1.
_GAMMA_OF_TABLES = 1.0
_SELECTION: dict[str, Any] = {"ask": "means", "spread": "kernel"}
#: Optimizer steps and batch size of a student on features.
_STEPS, BATCH = 1_000, 32
# Folds of a simulation, each with a noise seed.
_FOLDS = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """Teacher and feature width.

    Attributes:
        teacher: one of :data:`TEACHERS`.
        width: components of the features.
    """

    teacher: str
    width: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Public constants of the rules.

    Attributes:
        private_records: n, approximate number of private records; becomes public.
        epsilon: target ε.
        delta: target δ.
        num_classes: C.
        public: number of public examples.
        examples: kind of examples, one of :data:`RULES`.
        public_kind: one of :data:`KINDS`.
        task: ``"multiclass"``, or ``"multilabel"`` where C is a number of attributes.
        unit: what is protected, ``"record"`` or ``"person"``.
        columns: of a table the number of categories of each column, 0 of numbers; None for other examples.
        metric: one of :data:`METRICS`.
    """

    private_records: int
    epsilon: float
    delta: float
    num_classes: int
    public: int
    examples: str = "images"
    public_kind: str = "same"
    task: str = "multiclass"
    unit: Unit = "record"
    columns: tuple[int, ...] | None = None
    metric: str = "accuracy"

    def shifted(self) -> Sizes:
        """Copy of these sizes with the rules for a domain shift."""
        examples = "shifted" if self.examples == "images" else self.examples
        return dataclasses.replace(self, examples=examples, public_kind="other")

    @property
    def labels(self) -> str:
        """Noun for the labels: classes or attributes."""
        return "attributes" if self.task == "multilabel" else "classes"

    @property
    def budget(self) -> dict[str, Any]:
        """Budget of the run in plain types, without default values."""
        unit = {} if self.unit == "record" else {"unit": self.unit}
        return {"epsilon": self.epsilon, "delta": self.delta, **unit}

    @property
    def ratio(self) -> float:
        """Ratio n ε / C, which decides between the teachers."""
        return self.private_records * self.epsilon / self.num_classes

    @property
    def crossing(self) -> float:
        """Break-even value of :attr:`ratio`, above which released gradients are more accurate than votes."""
        return min(self._rule.ratio, self._rule.most / self.num_classes)

    @property
    def _rule(self) -> Rule:
        many = self.examples == "images" and self.num_classes > FEW
        return RULES["vectors" if many else self.examples]

    def _widths(self, teacher: str) -> Widths:
        return self._rule.votes if teacher == "ReverseKNN" else self._rule.gradients

    @property
    def clusters(self) -> int:
        """Number of public clusters that records vote for."""
        wanted = max(2 * self.num_classes, round(self.private_records * self.epsilon / _VOTES_A_CLUSTER))
        return max(2, min(wanted, self.public // _PUBLIC_A_CLUSTER))

    def settings(self, teacher: str) -> list[Setting]:
        """Settings of a teacher, from narrow to wide."""
        widths = sorted({max(2, min(width, self.public // 3)) for width, _ in self._widths(teacher)})
        return [Setting(teacher, width) for width in widths]

    def rule(self, teacher: str | None = None) -> Setting:
        """Setting chosen by the measured rules, of one teacher or of all."""
        if teacher is None:
            votes = self.ratio <= self.crossing and self.public_kind == "same" and self.task == "multiclass"
            teacher = "ReverseKNN" if votes else "PreconditionedGradients"
        signal = self.private_records * self.epsilon * min(1.0, _MOST_CLASSES / self.num_classes)
        place = sum(signal > most for _, most in self._widths(teacher))
        settings = self.settings(teacher)
        return settings[min(place, len(settings) - 1)]

    def centre_share(self, setting: Setting) -> float | None:
        """Share of μ for a released centre; None for teachers without one, or where noise would dominate it."""
        if setting.teacher != "PreconditionedGradients":
            return None
        planned = PreconditionedGradients(
            budget=Budget(self.epsilon, self.delta),
            private_records=self.private_records,
            centre_share=_CENTRE_SHARE,
        )
        length = planned.length_of_centre_noise(setting.width)
        if length <= _CENTRE_NOISE:
            return _CENTRE_SHARE
        if self.public_kind == "same":
            return None
        if length * _CENTRE_SHARE / _LARGER_CENTRE_SHARE >= 1:
            raise ValueError(
                f"epsilon={self.epsilon:g}: the noise of a centre of {self.private_records} records has length "
                f"{length * _CENTRE_SHARE / _LARGER_CENTRE_SHARE:.2g}, and a feature vector 1; raise epsilon, or say "
                "public_kind='same'"
            )
        return _LARGER_CENTRE_SHARE


def usual_delta(records: int) -> float:
    """Largest power of ten that is at most 1/(10 n) for n records."""
    return 10.0 ** math.floor(-math.log10(10 * records))


# ------------------------------------------------------------------------------- what a teacher would do


def answers(
    setting: Setting,
    sizes: Sizes,
    public: Tensor,
    private: Tensor,
    labels: Tensor,
    seed: int = 0,
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Simulated answers of a teacher about all public examples, from public examples in place of private records.

    Fewer records than ``sizes.private_records`` represent that number: the noise is reduced in proportion.

    Args:
        setting: the teacher.
        sizes: the planned sizes.
        public: features of public examples, ``(m, d)``.
        private: features of the public examples used as records, ``(s, d)``.
        labels: their classes, int64 ``(s,)``, or attributes ``(s, c)``.
        seed: of the noise and the clusters.

    Returns:
        Class probabilities of the public examples, float32 ``(m, c)``, and the teacher's own model or None.
    """
    share, source, ledger = len(private) / sizes.private_records, SeededNoise(seed), FreeLedger()
    if setting.teacher == "ReverseKNN":
        votes = ReverseKNN(budget=Budget(sizes.epsilon / share), noise_source=source)
        select = ClusterSelection(**_SELECTION)
        nothing = torch.full((len(public),), -1)
        pool = PublicPool(nothing, nothing >= 0, lambda: public)
        selection = select(pool, sizes.clusters, torch.Generator().manual_seed(seed))
        votes.fit(PrivateRecords.of(private, labels, sizes.num_classes))
        release = votes.label(selection.query_features(public), ledger)
        assert selection.spread is not None
        assert release.scores is not None
        assert release.score_deviation is not None
        return label_by_spread(selection.spread, release.scores, release.score_deviation)[1], None
    planned = PreconditionedGradients(budget=Budget(sizes.epsilon, sizes.delta))
    sums = PreconditionedGradients(
        noise_multiplier=planned.noise_multiplier * share,
        private_records=len(private),
        task=sizes.task,
        noise_source=source,
    )
    sums.fit(PrivateRecords.of(private, labels, sizes.num_classes, public=public))
    soft = sums.label(public, ledger).probabilities
    state = sums.head_state()
    assert soft is not None
    assert state is not None
    return soft, sums.head(state)


def probe(features: Tensor, soft: Tensor, penalty: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """Fit softmax regression from features ``(m, d)`` to probabilities ``(m, c)``; returns the model."""
    weights = torch.zeros(soft.shape[1], features.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60)

    def scores(of: Tensor) -> Tensor:
        return of @ weights[:, :-1].T + weights[:, -1]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -(soft * scores(features).log_softmax(1)).sum(1).mean() + penalty * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return lambda of: scores(of).softmax(1).detach()


def teacher_extractor(setting: Setting, pretrained: bool, columns: Sequence[int] | None = None) -> Extractor:
    """Feature extractor of a setting; of rows of a table with these :attr:`Sizes.columns`."""
    if columns is not None:
        rows = TableFeatures(columns)
        if setting.teacher == "ReverseKNN":
            return PublicPCA(rows, setting.width, _POWER)
        return PublicKernelPCA(rows, _GAMMA_OF_TABLES, setting.width, _POWER, _LANDMARKS)
    if setting.teacher == "ReverseKNN":
        return PublicFeatures(setting.width, pretrained=pretrained)
    joined = PublicFeatures(BENEATH, pretrained=pretrained)
    return PublicKernelPCA(joined, components=setting.width, power=_POWER, landmarks=_LANDMARKS)


def narrowed(features: Tensor, width: int) -> Tensor:
    """First components of a public PCA, scaled to unit length."""
    return torch.nn.functional.normalize(features[:, :width], dim=1)


def compare(
    candidates: list[Setting], sizes: Sizes, tables: Mapping[str, tuple[Tensor, Tensor]], truth: Tensor
) -> dict[Setting, Tensor]:
    """Correct predictions of each candidate in a cross-validated simulation, ``(folds · s,)``.

    Bool for classes; for attributes the share of correct ones, float64.

    Args:
        candidates: settings to compare.
        sizes: the planned sizes.
        tables: features by teacher, as wide as its widest candidate, of all public examples and of the labelled
            ones, ``(s, d)``.
        truth: labels, int64 ``(s,)``, or attributes ``(s, c)``.
    """
    order = torch.randperm(len(truth), generator=torch.Generator().manual_seed(0))
    right: dict[Setting, list[Tensor]] = {setting: [] for setting in candidates}
    for fold in range(_FOLDS):
        held = torch.zeros(len(truth), dtype=torch.bool)
        held[order[fold::_FOLDS]] = True
        for setting in candidates:
            asked, simulated = (narrowed(table, setting.width) for table in tables[setting.teacher])
            soft, own = answers(setting, sizes, asked, simulated[~held], truth[~held], fold)
            model = own or probe(asked, soft)
            right[setting].append(TASKS[sizes.task].hits(model(simulated[held]), truth[held]))
    return {setting: torch.cat(parts) for setting, parts in right.items()}


# ------------------------------------------------------------------------------- the public side


@dataclasses.dataclass(frozen=True)
class Parts:
    """Arguments of a recommended run's objects.

    Attributes:
        student: of :class:`~pl_privknn.students.SupervisedStudent`, besides what the data say.
        labeling: of :class:`~pl_privknn.callbacks.PrivateLabeler`.
        trainer: of Lightning's Trainer.
    """

    student: dict[str, Any]
    labeling: dict[str, Any]
    trainer: dict[str, Any]

    def sections(self) -> dict[str, Any]:
        """Sections ``model``, ``labeling`` and ``trainer`` of a configuration."""
        return {
            "model": {"class_path": "SupervisedStudent", "init_args": plain_arguments(self.student)},
            "labeling": plain_arguments(self.labeling),
            "trainer": {**self.trainer, "accelerator": "auto", "devices": 1},
        }


def parts_of(setting: Setting, sizes: Sizes) -> Parts:
    """Objects of a setting: teacher, selection and features, and arguments of a student on these features."""
    features = teacher_extractor(setting, has_pretrained(), sizes.columns)
    labeler: Labeler
    if setting.teacher == "ReverseKNN":
        labeler = ReverseKNN(k=1)
        asked: dict[str, Any] = {
            "queries_per_round": sizes.clusters,
            "selection": ClusterSelection(**_SELECTION),
            "released": "student",
        }
        # Of unit vectors a rate of 3 and a penalty of 0.001; the student scales them to a norm of √width.
        network, optimizer, lr, decay = "linear_probe", "sgd", 3 / setting.width, setting.width / 1000
    elif setting.teacher == "SufficientStatistics":
        labeler = SufficientStatistics(private_records=sizes.private_records, fit="nearest_mean")
        asked = {"selection": FullSelection(), "released": "head"}
        network, optimizer, lr, decay = "mlp", "adamw", 0.002, 0.001
    else:
        arguments: dict[str, Any] = {"private_records": sizes.private_records}
        if (share := sizes.centre_share(setting)) is not None:
            arguments["centre_share"] = share
        if sizes.task == "multilabel":
            arguments["task"] = sizes.task
        if sizes.public_kind == "other":
            arguments["releases"] = _RELEASES_OF_SHIFTED
        labeler = PreconditionedGradients(**arguments)
        asked = {
            "selection": FullSelection(),
            "released": "auto" if sizes.public_kind == "same" else "head",
        }
        if sizes.metric == "balanced_accuracy":
            asked["options"] = LabelingOptions(balanced=True)
        network, optimizer, lr, decay = "mlp", "adamw", 0.002, 0.001
    optimization = {
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": decay,
        "scheduler": "one_cycle",
        "decay_vectors": False,
    }
    epochs = min(max(10, math.ceil(_STEPS * BATCH / sizes.public)), 80)
    return Parts(
        student={"network": network, "optimization": optimization, "extractor": features},
        labeling={
            "labeler": labeler, "rounds": 1, "features": [features], **asked, "budget": sizes.budget
        },
        trainer={"max_epochs": epochs},
    )  # fmt: skip


#: Reasons for each teacher, in words.
WHY = {
    "ReverseKNN": "Each record votes once, for its nearest cluster of public examples; with few records at this ε, "
    "votes lose less accuracy to noise than gradients.",
    "SufficientStatistics": "A class is as likely as another, whatever its number of records, so rare ones are "
    "found, at the cost of accuracy on large ones (metric balanced_accuracy).",
    "PreconditionedGradients": "A few noisy gradient sums train a linear model, whose answers cost no further "
    "budget; with this many records at this ε, it is more accurate than votes.",
}


def takes_pretrained(data: PrivatePublicDataModule) -> bool:
    """Return whether features of a pretrained network are installed and fit the images."""
    return has_pretrained() and len(data.image_shape) == 3 and data.image_shape[0] in (1, 3)


def private_in_words(sizes: Sizes) -> str:
    """Size of the private part, ε and δ, as text."""
    return (
        f"{counted(sizes.private_records, 'private record')} (your estimate); ε {sizes.epsilon:g} at δ "
        f"{sizes.delta:g}"
    )
