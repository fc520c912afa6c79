"""Release of class names, column kinds and categories in a run's folder, before training continues the run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pl_privknn.callbacks.private_labeler import PrivateLabeler
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.features.base import Extractor
from pl_privknn.features.private_records import is_foreign
from pl_privknn.privacy.partitions import release_names
from pl_privknn.privacy.records import foreign_loader
from pl_privknn.privacy.redaction import redacted


def pay_for_names(
    labeling: PrivateLabeler, data: PrivatePublicDataModule, folder: str | Path
) -> dict[str, Any]:
    """Open a run, release the names that are not stated, and return the data module's arguments that state them.

    Args:
        labeling: states the whole plan of the run, which a trainer continues in that folder.
        data: owes the names.
        folder: of the run.

    Raises:
        ValueError: for features of others, or where fewer than two classes are released.
    """
    assert labeling.labeler is not None
    assert data.names is not None
    ours = all(isinstance(each, Extractor) and not is_foreign(each) for each in labeling.features)
    if labeling.released != "head" or not ours or foreign_loader(data) is not None:
        raise ValueError(
            "names: they are paid for by data modules and features of this package, where released='head'; state "
            "classes and kinds of columns instead"
        )
    run, budget = labeling.open_run(data, folder), labeling.budget
    try:
        released = redacted(
            release_names,
            data.names,
            run.folder,
            run.ledger_run,
            budget,
            labeling.labeler.noise_source,
            functools.partial(data.unnamed_records, budget.unit),
        )
    finally:
        run.close()
        run.ledger.close()
    if "classes" in released and len(released["classes"]) < 2:
        raise ValueError(
            f"classes: {len(released['classes'])} has the number of records that its name is released for (about "
            f"{data.names.threshold(budget):.0f} at this ε); state the classes by classes= (--classes)"
        )
    return data.arguments_of(released, budget)
