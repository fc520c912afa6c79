# %% [markdown]
# # A table without public data
#
# The commonest private data are tables, and few have a public counterpart. This example uses the breast cancer data
# of scikit-learn: replace them with your own CSV file. Run it with
# `python docs/guides/gallery/table_without_public_data.py`, or cell by cell in an editor that supports `# %%`.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_breast_cancer

from pl_privknn import TableDataModule, recommend

pl.seed_everything(0)
source = load_breast_cancer()
columns = ["mean radius", "mean texture", "mean smoothness", "mean concavity", "mean symmetry"]
places = [list(source.feature_names).index(column) for column in columns]
order = np.random.default_rng(0).permutation(len(source.data))
table = pyarrow.table(
    dict(zip(columns, source.data[order][:, places].T, strict=True))
    | {"label": source.target_names[source.target[order]]}
)
private, test = table[:450], table[450:]

# %% [markdown]
# Bounds and classes are stated by who knows the subject, not read from the table: with them the guarantee has no
# condition. `recommend` finds no public rows, so the run pays for histograms of the columns and for their second
# moments, and draws rows that have both. Features are learned from these.

# %%
data = TableDataModule(
    private=private,
    public="none",
    test=test,
    classes=["benign", "malignant"],
    numeric={
        "mean radius": (5, 30),
        "mean texture": (5, 40),
        "mean smoothness": (0.05, 0.2),
        "mean concavity": (0, 0.5),
        "mean symmetry": (0.1, 0.35),
    },
    batch_size=32,
)
found = recommend(data, epsilon=1.0, private_records=450, name="tumours")
print(found)

# %%
student, labeling = found.build()
trainer = pl.Trainer(
    max_epochs=found.max_epochs,
    accelerator="cpu",
    callbacks=[labeling],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="runs/tumours",
)
trainer.fit(student, data)

# %% [markdown]
# The model is that of the released gradients.

# %%
head = labeling.load_head(Path("runs/tumours"))
with torch.no_grad():
    right = head(data.test.images()).argmax(dim=1) == data.test.labels
accuracy, epsilon = float(right.float().mean()), labeling.epsilon
print(f"test accuracy {accuracy:.3f} at ε = {epsilon:.4f}, δ = {labeling.delta:g}, {labeling.guarantee}")

# %% [markdown]
# The drawn rows are released, and useful on their own (`public_rows.csv` in the run's folder). Each panel shows a
# column: private rows as bars, which are drawn here because these data are not private, and drawn rows as a line.

# %%
drawn = data.schema.words(data.public.images())
figure, axes = plt.subplots(1, len(columns), figsize=(11, 2.6), layout="constrained")
for place, (axis, column) in enumerate(zip(axes, columns, strict=True)):
    values = np.array([float(row[place]) for row in drawn])
    bins = np.linspace(*data.schema.bounds[place], 17)
    axis.hist(private[column].to_numpy(), bins, density=True, color="0.8")
    axis.hist(values, bins, density=True, histtype="step", color="C3")
    axis.set_xlabel(column)
    axis.set_yticks([])
figure.savefig("table_without_public_data.png")
