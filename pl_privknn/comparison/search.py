"""Settings tried on public truth: a comparison in which public images stand in for private records."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pl_privknn._checks import check_int, shown
from pl_privknn.callbacks.private_labeler import LabelingBudget
from pl_privknn.callbacks.released_head import MODELS
from pl_privknn.comparison.results import Result
from pl_privknn.comparison.spec import Comparison, Method, SpecError
from pl_privknn.nested_settings import get

STAND_IN = "pl_privknn.datamodules.PublicStandInDataModule"
#: Places of the real run, which a search must not touch: the group, and its arguments by themselves.
_PLACES = ("files", "run_dir", "ledger_path", "ledger_head_path")


def search_of(
    document: Mapping[str, Any],
    name: str,
    values: Mapping[str, Sequence[Any]],
    records: int | None,
    seeds: Sequence[int],
) -> Comparison:
    """The comparison that tries all combinations of settings of a training configuration.

    Nothing of it touches the real run: its data are the public images of the configuration's data module (see
    :class:`~pl_privknn.datamodules.stand_in.PublicStandInDataModule`), and its ledgers lie in its own folder.

    Args:
        document: the configuration, with a ``labeling`` section that has a labeler.
        name: of the search.
        values: for each dotted path the values to try.
        records: about how many private records there will be; the labeler's ``expected_records`` if None.
        seeds: of training and of selection; the noise is drawn anew in every run.

    Raises:
        SpecError: for a configuration without a labeler, an unknown path, or a missing number of records.
    """
    labeler = get(document, "labeling.labeler")
    if not isinstance(labeler, Mapping):
        raise SpecError("labeling.labeler is missing: a search tries settings of a teacher and its student")
    if records is None:
        records = get(labeler, "init_args.expected_records")
    if records is None:
        raise SpecError("--records is missing: say about how many private records there will be")
    check_int("--records", records)
    for path in values:
        section = path.partition(".")[0]
        if section not in ("labeling", "model", "trainer"):
            raise SpecError(f"--set {path}: want a path that begins with labeling, model or trainer")
    if refused := [path for path in values if path.split(".")[1:2] and path.split(".")[1] in _PLACES]:
        raise SpecError(f"--set {refused[0]}: a search has places of its own; leave it out")
    labeling = {key: value for key, value in document["labeling"].items() if key not in _PLACES}
    base = {
        "data": {"class_path": STAND_IN, "init_args": {"data": document["data"], "records": records}},
        "student": document["model"],
        "trainer": dict(document.get("trainer") or {}),
        "labeling": labeling,
    }
    paths = list(values)
    methods = [
        _method(f"setting_{place}", dict(zip(paths, chosen, strict=True)))
        for place, chosen in enumerate(itertools.product(*values.values()))
    ]
    budget = LabelingBudget(**(labeling.get("budget") or {}))
    return Comparison(
        name=name,
        base=base,
        delta=budget.delta,
        adjacency=budget.adjacency,
        noise_seeded=False,
        seeds=tuple(check_int("--seeds", seed, 0) for seed in seeds),
        epsilons=(math.inf,),
        methods=tuple(methods),
        wandb=None,
    )


def _method(name: str, setting: dict[str, Any]) -> Method:
    title = ", ".join(f"{path.rpartition('.')[2]}={shown(value)}" for path, value in setting.items())
    return Method(
        name=name,
        title=title or "as it is",
        kind="stand_in",
        labeling={},
        model=None,
        trainer={},
        epsilon_to=(),
        calibrate=None,
        settings={},
        nonprivate=setting,
        epsilons=(math.inf,),
    )


def ranked(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Settings with their results, the best first: by the mean of their accuracies on the stand-in's test images."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.title, []).append(result)
    return sorted(found.items(), key=lambda item: -statistics.mean(result.accuracy for result in item[1]))


def search_table(results: Sequence[Result]) -> str:
    """A table of Markdown, the best setting first, and how many there were."""
    settings = ranked(results)
    models = [name for name in MODELS if f"{name}_test_accuracy" in results[0].values]
    header = ["setting", "test accuracy", *models, "label accuracy", "seeds"]
    lines = [header, ["---"] * len(header)]
    for title, runs in settings:
        names = ("test_accuracy", *(f"{name}_test_accuracy" for name in models), "label_accuracy")
        figures = [_mean([run.values.get(name) for run in runs]) for name in names]
        lines.append([title, *figures, str(len(runs))])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    how = "on public truth, with the noise of the real run"
    return f"{table}\n\nBest of {len(settings)} settings, {how}: {settings[0][0]}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    spread = f" ± {statistics.stdev(known):.4f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.4f}{spread}"
