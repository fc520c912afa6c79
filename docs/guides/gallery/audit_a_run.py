# %% [markdown]
# # Audit a run
#
# An auditor receives two files of a run, `summary.json` and `run.sqlite`, and trusts neither. This script first
# makes a run to audit: reverse kNN on scikit-learn's bundled digits, one noisy release for all queries.

# %%
import contextlib
import io
import json
from pathlib import Path

import pytorch_lightning as pl

from pl_privknn import (
    HOG,
    Budget,
    ClusterSelection,
    DigitsDataModule,
    LabelingOptions,
    PrivateLabeler,
    ReverseKNN,
    SupervisedStudent,
    write_report,
)
from pl_privknn.cli import main

folder = Path("runs/audited")
labeling = PrivateLabeler(
    ReverseKNN(k=1),
    queries_per_round=30,
    selection=ClusterSelection(),
    features=HOG(),
    budget=Budget(epsilon=1.0, delta=1e-4),
    run_dir=folder,
    options=LabelingOptions(progress=False),
)
student = SupervisedStudent(network="small_cnn", num_classes=10, in_channels=1, image_size=20)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="auto",
    devices=1,
    callbacks=[labeling],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
)
trainer.fit(student, datamodule=DigitsDataModule(batch_size=32))

# %% [markdown]
# ## Two files
#
# The audit checks the hash chain, recomputes ε from the rows, lists every release, and compares each figure of the
# summary with the ledger. Its exit status is 0.

# %%
summary, ledger = folder / "summary.json", folder / "run.sqlite"
honest = main(["audit", str(summary), str(ledger)])

# %% [markdown]
# ## Three forgeries
#
# The summary is changed to make the run look better: a smaller ε, another δ, more answers. The exit status is 1, and
# the audit names the wrong figure.

# %%
stated = json.loads(summary.read_text())
found = {}
for name, value in {"epsilon": 0.1, "delta": 1e-6, "answered": stated["answered"] + 100}.items():
    forged = folder / f"forged_{name}.json"
    forged.write_text(json.dumps({**stated, name: value}))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(["audit", str(forged), str(ledger)])
    found[name] = status, printed.getvalue().strip().splitlines()[-1]
    print(name, *found[name], sep=": ")

# %% [markdown]
# ## A report for readers
#
# One HTML file states the guarantee in words and shows the queried public images with their answers. A privacy card
# for whoever approves the release is written to the same folder.

# %%
page = write_report(folder)
print(page)
print((folder / "privacy_card.md").read_text())
