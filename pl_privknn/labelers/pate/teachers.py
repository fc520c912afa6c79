"""PATE's teachers: what a trained ensemble answers, and ensembles of scikit-learn style classifiers."""

from __future__ import annotations

import abc
import copy
import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pl_privknn._checks import check_int
from pl_privknn.privacy.private_side import silenced, terminal

#: Told how much of the training is done, as a fraction in [0, 1].
TrainingProgress = Callable[[float], None]


class TrainedTeachers(abc.ABC):
    """An ensemble after its training: private, because each teacher remembers its records.

    Attributes:
        num_teachers: how many teachers there are, silent ones included.
        empty: bool, shape ``(t,)``; teachers whose part held no record. They abstain.
        failed: bool, shape ``(t,)``; teachers whose training broke. They abstain.
        failures: kinds of failure (exception types, ``"not finite"``), never with values from the records.
    """

    def __init__(self, empty: Tensor, failed: Tensor, failures: frozenset[str] = frozenset()) -> None:
        self.num_teachers = len(empty)
        self.empty = empty
        self.failed = failed
        self.failures = failures

    @abc.abstractmethod
    def predict(self, queries: Tensor) -> Tensor:
        """Each teacher's class for each query.

        Args:
            queries: float32, shape ``(m, d)``.

        Returns:
            int64, shape ``(m, t)``; -1 where a teacher abstains.
        """

    def state(self) -> dict[str, Tensor] | None:
        """The trained ensemble as tensors, for a private cache; None where that is not possible."""
        return None


class Teachers(abc.ABC):
    """How teachers are made: settings only, no data.

    Every teacher has to be a function of its own part, its own number and public settings: nothing about
    *another* part may reach it, not even that part's size. That is what makes one record change one vote.
    """

    #: Whether :meth:`restore` can rebuild an ensemble from :meth:`TrainedTeachers.state`.
    cacheable: bool = False

    @abc.abstractmethod
    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: TrainingProgress,
    ) -> TrainedTeachers:
        """Train one teacher a part.

        Args:
            features: float32, shape ``(n, d)``.
            labels: int64, shape ``(n,)``.
            parts: int64, shape ``(n,)``; the teacher of each record.
            num_classes: number of classes; a part need not hold all of them.
            num_teachers: number of teachers.
            progress: told how far the training is.
        """

    def restore(self, state: dict[str, Tensor], num_features: int, num_classes: int) -> TrainedTeachers:
        """Rebuild an ensemble from its :meth:`TrainedTeachers.state`."""
        raise NotImplementedError(f"{type(self).__name__} can't be cached")

    @abc.abstractmethod
    def settings(self) -> str:
        """All settings that decide the result, as text; part of the key of a private cache."""


@contextmanager
def _quiet_estimators() -> Iterator[None]:
    """Nothing that estimators say comes out; joblib's threads share this silence, its older processes may not."""
    import joblib

    with silenced(), joblib.parallel_config(backend="threading"):
        yield


class SklearnTeachers(Teachers):
    """One scikit-learn style classifier a part, trained one after another.

    A part with a single class gives a teacher that always votes for it. A teacher whose ``fit`` or
    ``predict`` raises abstains; see :class:`~pl_privknn.labelers.pate.pate.PATE` for making that an error. What
    estimators print, log and warn of is dropped, since it names counts of classes; joblib works for them in threads.

    Args:
        estimator: an object with ``fit(X, y)`` and ``predict(X)``, or the dotted name of its class, for
            instance ``"sklearn.linear_model.LogisticRegression"``. A name is imported when training begins.
        params: arguments for the class, where a name is given.
        seed: where the estimator has an unset ``random_state``, teacher t gets one made from this and t.

    Raises:
        ValueError: for an object without ``fit`` or ``predict``; at training, if the name can't be imported.

    Example:
        >>> import torch
        >>> from pl_privknn.labelers import PATE, SklearnTeachers
        >>> teachers = SklearnTeachers("sklearn.tree.DecisionTreeClassifier")
        >>> teacher = PATE(num_teachers=4, teachers=teachers, progress=False)
        >>> teacher.fit(torch.rand(40, 4), torch.arange(40) % 2, 2)
        >>> teacher.votes(torch.rand(5, 4)).shape
        torch.Size([5, 2])
    """

    def __init__(self, estimator: Any, params: dict[str, Any] | None = None, seed: int = 0) -> None:
        self.params = dict(params or {})
        if isinstance(estimator, str):
            if "." not in estimator or not all(part.isidentifier() for part in estimator.split(".")):
                raise ValueError(f"estimator={estimator!r} is no dotted name of a class; {_NAME_REMEDY}")
        else:
            if self.params:
                raise ValueError(
                    "params: only together with an estimator given by name; set them on the object"
                )
            _check_estimator(estimator, estimator)
        self.estimator = estimator
        self.seed = check_int("seed", seed, minimum=0)

    def settings(self) -> str:
        """See :meth:`Teachers.settings`."""
        return f"{type(self).__name__}({self.estimator!r}, {self.params!r}, seed={self.seed})"

    @_quiet_estimators()
    def train(
        self,
        features: Tensor,
        labels: Tensor,
        parts: Tensor,
        num_classes: int,
        num_teachers: int,
        progress: TrainingProgress,
    ) -> TrainedTeachers:
        """See :meth:`Teachers.train`.

        Raises:
            ValueError: if the estimator's name leads to nothing that can be made.
        """
        prototype = self._prototype()
        models: list[Any] = []
        empty = torch.zeros(num_teachers, dtype=torch.bool)
        failed = torch.zeros(num_teachers, dtype=torch.bool)
        failures = set()
        for teacher, rows in enumerate(rows_of_parts(parts, num_teachers)):
            x, y = features[rows].numpy(), labels[rows].numpy()
            model: Any = None
            if len(rows) == 0:
                empty[teacher] = True
            elif (y == y[0]).all():
                model = _Constant(int(y[0]))
            else:
                try:
                    model = self._fresh(prototype, teacher).fit(x, y)
                except Exception as error:  # whatever a user's classifier raises; its text may hold records
                    failed[teacher] = True
                    failures.add(type(error).__name__)
            models.append(model)
            progress((teacher + 1) / num_teachers)
        return _SklearnEnsemble(models, num_classes, empty, failed, frozenset(failures))

    def _prototype(self) -> Any:
        if not isinstance(self.estimator, str):
            return self.estimator
        module, _, name = self.estimator.rpartition(".")
        try:
            made = getattr(importlib.import_module(module), name)(**self.params)
        except Exception as error:  # whatever a module or a class raises; no record is in reach of either
            raise ValueError(
                f"estimator={self.estimator!r} with params={self.params!r} can't be made "
                f"({type(error).__name__}: {error}); {_NAME_REMEDY}"
            ) from None
        return _check_estimator(made, self.estimator)

    def _fresh(self, prototype: Any, teacher: int) -> Any:
        from sklearn.base import clone

        model = clone(prototype) if hasattr(prototype, "get_params") else copy.deepcopy(prototype)
        if hasattr(model, "get_params") and model.get_params().get("random_state", 0) is None:
            model.set_params(random_state=teacher_seed(self.seed, teacher) % (1 << 32))
        return model


class _SklearnEnsemble(TrainedTeachers):
    def __init__(
        self, models: list[Any], num_classes: int, empty: Tensor, failed: Tensor, failures: frozenset[str]
    ) -> None:
        super().__init__(empty, failed, failures)
        self._models = models
        self._num_classes = num_classes

    @_quiet_estimators()
    def predict(self, queries: Tensor) -> Tensor:
        votes = torch.full((len(queries), self.num_teachers), -1, dtype=torch.int64)
        if len(queries) == 0:
            return votes
        x = queries.numpy()
        for teacher, model in enumerate(self._models):
            if model is None:
                continue
            try:
                answers = np.asarray(model.predict(x))
                if answers.shape != (len(queries),):
                    continue
                classes = torch.from_numpy(answers.astype(np.int64))
                known = (
                    torch.from_numpy(np.isfinite(answers)) & (classes >= 0) & (classes < self._num_classes)
                )
            except Exception:  # it abstains; its message may hold records
                continue
            votes[:, teacher] = torch.where(known, classes, -1)
        return votes


class _Constant:
    def __init__(self, label: int) -> None:
        self.label = label

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.label, dtype=np.int64)


def rows_of_parts(parts: Tensor, num_parts: int) -> list[Tensor]:
    """Row numbers of each part in ascending order: ``num_parts`` tensors, int64."""
    order = parts.argsort(stable=True)
    sizes = torch.bincount(parts, minlength=num_parts).tolist()
    return list(order.split(sizes))


def teacher_seed(seed: int, teacher: int, purpose: str = "") -> int:
    """A 63-bit seed for one teacher, a function of (seed, teacher, purpose) alone."""
    digest = hashlib.sha256(f"pl_privknn.pate/{seed}/{teacher}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def progress_bar(what: str, enabled: bool) -> Iterator[TrainingProgress]:
    """A progress bar on a terminal; silent elsewhere, and where another one can't be joined.

    It shows a fraction of what is public, the number of teachers and of their steps. No time that is left: how long
    teachers take depends on their parts.
    """
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    with terminal() as stream:
        console = Console(file=stream)
        if not enabled or not console.is_terminal:
            yield lambda fraction: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        bar = Progress(*columns, console=console, transient=True)
        try:
            bar.start()
        except LiveError:  # before rich 14.1 a bar inside another bar is refused
            yield lambda fraction: None
            return
        try:
            task = bar.add_task(what, total=1.0)
            yield lambda fraction: bar.update(task, completed=fraction)
        finally:
            bar.stop()


_NAME_REMEDY = (
    "give the dotted name of a class, like 'sklearn.linear_model.LogisticRegression', and its own arguments"
)


def _check_estimator(made: Any, shown: Any) -> Any:
    if isinstance(made, type) or not (hasattr(made, "fit") and hasattr(made, "predict")):
        raise ValueError(f"estimator={shown!r} must be an object with fit(X, y) and predict(X)")
    return made
