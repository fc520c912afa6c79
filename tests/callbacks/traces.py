"""What a run leaves for others to see, with its answers and what was learnt from them taken out.

Released labels, counts and weights may depend on private records: they were paid for. So may what is computed from
them (accuracies, losses, how many queries were answered). Nothing else may. Random names of runs, times and hashes
over them are taken out too.
"""

import csv
import json
import re
import sqlite3

import numpy as np
import torch

from pl_privknn.report.facts import facts_of

#: Of summary.json: answers, what was learnt from them, and what no two runs have alike.
ANSWERS = {"answered", "refused", "epsilon_spent", "label_accuracy", "label_accuracy_last_round"}
PUBLIC = {"label_baseline", "test_baseline", "test_examples"}  # of public labels
LEARNT = {"val_accuracy", "test_accuracy"} | {
    f"{name}_test_accuracy" for name in ("student", "head", "ensemble")
}
LEARNT |= {"test_balanced_accuracy", "test_recall", "test_calibration_error", "test_reliability"}
LEARNT_PICTURES = {"confusion", "tested", "tested_images", "tested_texts"}
OF_ITS_OWN = {"seconds", "ledger_head", "run_id", "run", "time", "head"}
#: Of metrics.csv.
ANSWERED = {
    "labels/answered", "labels/labelled", "labels/accuracy", "labels/accuracy_last_round", "privacy/epsilon_spent"
}  # fmt: skip
#: All figures that leave a run. Who adds one states here what it is made of: nothing but these.
FIGURES = {
    "metrics": {
        *("epoch", "step", "privacy/delta", "labels/queried"),  # public constants
        *("privacy/epsilon", "privacy/guarantee", "tradeoff/epsilon"),  # the plan
        *("privacy/epsilon_spent", "tradeoff/epsilon_spent"),  # charges, whose number follows from answers
        *("labels/answered", "labels/labelled"),  # released answers
        *("labels/accuracy", "labels/accuracy_last_round"),  # and public truth
        *("tradeoff/val_accuracy", "tradeoff/test_accuracy"),
    },
    "summary": {
        *("delta", "adjacency", "unit", "max_epsilon", "queried", "labeler", "epochs", "student", "data"),
        *(
            "versions",
            "earlier_runs",
            "epsilon_together",
            "seconds",
            "released",
            "run",
            "sampling_rate",
            "expected_batch_size",
            "max_grad_norm",
            "step",
        ),
        *(
            "epsilon",
            "epsilon_rdp",
            "epsilon_rdp_classic",
            "epsilon_pld",
            "epsilon_exact",
            "guarantee",
            "reason",
        ),
        *(
            "tpr_at_fpr_0.001",
            "tpr_at_fpr_0.01",
            "tpr_at_fpr_0.1",
            "advantage",
            "gaussian_dp_mu",
        ),
        *("noise_multiplier", "steps_planned"),  # up to here public constants and the plan
        *("epsilon_spent", "steps", "ledger_head"),  # charges
        *("answered", "refused", "lost", "remark"),  # released answers
        *ANSWERS,
        *LEARNT,
        *PUBLIC,
    },
}
#: Beginnings of the names of figures that students log.
OF_STUDENTS = ("train/", "val/", "test/")
#: Files whose length follows from the digits of accuracies, losses and noisy counts; their content is compared.
OF_ANSWERS = ("summary.json", "metrics.csv", "run.sqlite")


def traces(folder, shown=""):
    """Everything of a run that its neighbours must share, by name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = {
        "files": [str(path.relative_to(folder)) for path in files],
        "sizes": {path.name: path.stat().st_size for path in files if path.name not in OF_ANSWERS},
        "summary": masked_summary(json.loads((folder / "summary.json").read_text())),
        "metrics": masked_metrics(folder / "metrics.csv"),
        "ledger": masked_ledger(folder / "run.sqlite"),
        "shown": masked_text(shown),
    }
    if (folder / "run.sqlite").exists():
        found["labels"] = masked_labels(folder / "run.sqlite")
    if (folder / "pictures.npz").exists():
        with np.load(folder / "pictures.npz") as pictures:
            found["pictures"] = {
                name: pictures[name].shape if name in LEARNT_PICTURES else pictures[name].tolist()
                for name in pictures.files
            }
    for path in files:
        if path.suffix == ".ckpt":
            found[path.name] = masked_checkpoint(torch.load(path, weights_only=False))
        if path.suffix == ".yaml":
            found[path.name] = path.read_text()
        if path.suffix == ".json" and path.name != "summary.json":
            found[path.name] = without(json.loads(path.read_text()), OF_ITS_OWN)
    return found


def undeclared(folder):
    """Names of figures in a run's summary and metrics that are in no list; a student may log others."""
    with (folder / "metrics.csv").open() as file:
        metrics = {name for name in next(csv.reader(file)) if not name.startswith(OF_STUDENTS)}
    return metrics - FIGURES["metrics"], json.loads((folder / "summary.json").read_text()).keys() - FIGURES[
        "summary"
    ]


def report_traces(folder):
    """What a page shows, without answers, what was learnt from them, and what was charged in fact."""
    facts = facts_of(folder, exact=False)
    shown = without(facts, {*OF_ITS_OWN, "spent", "student", "answers", "checks"})
    shown["title"] = re.sub(r"(accuracy) [\d.]+", r"\1 …", shown["title"])
    shown["evaluation"] = re.sub(r"(accuracy|balanced) [\d.]+", r"\1 …", shown["evaluation"])
    shown["evaluation"] = re.sub(r"recall: .*", "recall: …", shown["evaluation"])
    answers = facts["answers"] or {"gallery": [], "rounds": {}}
    asked = [
        {name: one[name] for name in ("example", "round", "truth", "picture")} for one in answers["gallery"]
    ]
    checks = [(check["name"], check["agrees"]) for check in facts["checks"]]
    return (
        shown,
        facts["student"].keys(),
        asked,
        answers["rounds"],
        checks,
    )


def released(folder):
    """The answers themselves, and weights learnt from them."""
    last = torch.load(next(folder.rglob("*.ckpt")), weights_only=False)["state_dict"]
    weights = {name: value.double().sum().item() for name, value in last.items()}
    if not (folder / "run.sqlite").exists():
        return weights
    with sqlite3.connect(folder / "run.sqlite") as store:
        statement = "SELECT label, soft, score FROM queries ORDER BY round, position"
        return weights, store.execute(statement).fetchall()


def masked_summary(summary):
    masked = ANSWERS | LEARNT | OF_ITS_OWN
    return {name: "…" if name in masked and value is not None else value for name, value in summary.items()}


def masked_metrics(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    free = ANSWERED | {name for name in rows[0] if name.startswith(OF_STUDENTS)}
    return [{name: bool(value) if name in free else value for name, value in row.items()} for row in rows]


def masked_ledger(path):
    """Rows in order; of aggregations how many were paid is how many queries passed the screening."""
    with sqlite3.connect(path) as ledger:
        bodies = [json.loads(body) for (body,) in ledger.execute("SELECT body FROM rows ORDER BY position")]
        columns = ledger.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    screened = any(body.get("charge", {}).get("mechanism") == "noisy_screening" for body in bodies)
    rows = [without(body, OF_ITS_OWN) for body in bodies]
    for row in rows:
        if row["kind"] == "note":  # a name and a mark that are drawn for each stream of budgets
            row["topic"], row["text"] = row["topic"].split()[0], row["text"].split(":")[0]
        if screened and row.get("charge", {}).get("mechanism", "noisy_screening") != "noisy_screening":
            row["charge"]["count"] = "…"
    return columns, rows


def masked_labels(path):
    with sqlite3.connect(path) as store:
        tables = store.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        statement = "SELECT round, position, example, asked_at, released, score IS NULL FROM queries"
        asked, rounds = store.execute(statement).fetchall(), store.execute("SELECT * FROM rounds").fetchall()
        facts = {name: json.loads(value) for name, value in store.execute("SELECT name, value FROM facts")}
    return tables, asked, rounds, without(facts, OF_ITS_OWN)


def masked_checkpoint(value):
    """Keys, types, shapes and plain values; of tensors, which are learnt from answers, no values."""
    if isinstance(value, dict):
        return {name: "…" if name in OF_ITS_OWN else masked_checkpoint(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_checkpoint(item) for item in value]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)


def masked_text(text):
    """Words without colours and bars; numbers with a point are times, rates, ε, and figures of answers."""
    text = re.sub(r"\x1b\[[\d;?]*\w", "", text)
    text = re.sub(r"\d+:\d\d(:\d\d)?", "#", re.sub(r"\d+\.\d+", "#", text))
    text = re.sub(r"(answered\W+)\d+", r"\1#", text)
    text = " ".join(re.sub(r"[^\w#/:=.,'`()<>%-]+", " ", text).split())
    return re.sub(r" low accuracy .*?(released: head|measured|for it)", "", text)  # follows from accuracy


def without(value, names):
    if not isinstance(value, dict):
        return value
    return {name: without(item, names) for name, item in value.items() if name not in names}
