"""Empirical audit of whole labelers: what comes out of ``fit`` and ``label``, held against the stated plan.

:mod:`pl_privknn.privacy.auditing.worst_pairs` runs mechanisms. A labeler can still draw other noise than it charges,
or toss its coins at another rate; so here the labeler itself is run, many times, with a record and without it. A
score that tells the two apart is learned from runs of its own, and tested on others as in
:func:`pl_privknn.privacy.auditing.lower_bound.audit`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pl_privknn._checks import check_int
from pl_privknn.labelers.base import JoinsRuns, Labeler, Release
from pl_privknn.privacy.auditing.lower_bound import Experiment, audit
from pl_privknn.privacy.noise import NoiseSource, default_noise
from pl_privknn.testing.ledger import FreeLedger
from pl_privknn.testing.scenes import SCENES, Scene, scenes_of
from pl_privknn.testing.shards import in_shards

__all__ = ["SCENES", "audit_labeler"]

Floats = NDArray[np.float64]
#: Runs on either side of a scene; half as many more teach its score.
DEFAULT_TRIALS = 4000


def audit_labeler(
    kind: type[Labeler],
    *,
    delta: float = 1e-5,
    trials: int = DEFAULT_TRIALS,
    confidence: float = 0.999,
    noise: NoiseSource | None = None,
    shards: int = 1,
) -> list[dict[str, Any]]:
    """Audit a labeler of the project, or a class derived from one, at settings at which one record shows.

    Real settings hide one record well, faults included, so every class has settings of its own here: few neighbours
    or teachers, and noise of about the size of a vote. What is wrong in the code is as wrong there.

    Args:
        kind: the class.
        delta: δ.
        trials: runs on either side of each scene.
        confidence: a true claim is called violated with probability at most 1 − confidence, for each row.
        noise: where protective randomness comes from; the operating system's generator by default.
        shards: run it as a training of so many processes has it, each of which holds a share of the records.

    Returns:
        One row a scene: ``labeler``, ``scene``, ``releases`` of one run, and the fields of
        :class:`~pl_privknn.privacy.auditing.lower_bound.AuditResult`.

    Raises:
        ValueError: for arguments out of range, or a class that there are no settings for.
    """
    trials = check_int("trials", trials, minimum=200)
    source = noise if noise is not None else default_noise()
    rows = []
    for number, scene in enumerate(scenes_of(kind)):
        stream = source.stream("scene", number)
        plan = kind(**scene.settings).plan(scene.repeats, scene.repeats, scene.num_classes)
        result = audit(
            plan,
            learned(scene, kind, max(100, trials // 2), stream.stream("pilot"), shards),
            delta=delta,
            trials=trials,
            confidence=confidence,
            noise=stream,
        )
        releases = sum(charge.count for charge in plan)
        rows.append({"labeler": kind.__name__, "scene": scene.name, "releases": releases, **result.to_dict()})
    return rows


def learned(scene: Scene, kind: type[Labeler], pilot: int, noise: NoiseSource, shards: int = 1) -> Experiment:
    """An experiment whose score is learned from ``pilot`` runs on either side.

    Each number that a run releases is weighted by the difference of its means over its variance. Which score is taken
    has no bearing on the validity of the audit, only on what it sees.
    """
    here, away = (
        outcomes(scene, kind, present, pilot, noise.stream(int(present)), shards) for present in (True, False)
    )
    variance = (here.var(axis=0) + away.var(axis=0)) / 2
    shift = here.mean(axis=0) - away.mean(axis=0)
    # A number that never changes on either side, and differs between them, settles it alone.
    weights = np.divide(shift, variance, out=np.sign(shift) * 1e6, where=variance > 0)

    def experiment(present: bool, runs: int, source: NoiseSource) -> Floats:
        # Low bits of floating-point noise are left out, as for single mechanisms.
        scores: Floats = (outcomes(scene, kind, present, runs, source, shards) @ weights).round(9)
        return scores

    return experiment


def outcomes(
    scene: Scene, kind: type[Labeler], present: bool, runs: int, noise: NoiseSource, shards: int = 1
) -> Floats:
    """What runs released, as numbers: float64, shape ``(runs, numbers)``."""
    blocks = []
    for number in range(-(-runs // scene.at_once)):
        labeler = in_shards(lambda: kind(**scene.settings), shards)
        labeler.noise_source = noise.stream("call", number)
        labeler.fit(*scene.table(present), scene.num_classes)
        release = labeler.label(scene.queries(), FreeLedger(start=number))
        if isinstance(labeler, JoinsRuns):
            labeler.leave_run()
        blocks.append(numbers_of(release, scene.num_classes).reshape(scene.at_once, -1))
    return np.concatenate(blocks)[:runs]


def numbers_of(release: Release, num_classes: int) -> Floats:
    """Labels of one answer as indicators, and its noisy counts or probabilities where they are let out."""
    labels = release.labels
    if labels.ndim == 1:
        labels = torch.nn.functional.one_hot(labels + 1, num_classes + 1)
    parts = [labels.double()]
    for numbers in (release.scores, release.soft):
        if numbers is not None:
            parts.append(numbers.double().nan_to_num(0.0))
    return torch.cat(parts, dim=1).numpy()
