# %% [markdown]
# # Vectors of a foundation model, several per patient
#
# Toolkits of medical foundation models write a table with one row per slide, region or visit: a patient, a diagnosis,
# and an embedding, a list of several hundred floats. This table is sufficient: no images and no extractor are needed.
# Run it with `pip install 'pl-privknn[text]'` and `python examples/patient_vectors.py`.
#
# This example uses scikit-learn's bundled digits in place of slides and HOG in place of the foundation model. Each
# patient has one to six slides, all of the same class.

# %%
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits

from pl_privknn import HOG, TextDataModule, recommend
from pl_privknn.export import export_run

FOLDER = Path("data/patients")
EPSILON = 4.0
rng = np.random.default_rng(0)
digits = load_digits(n_class=4)
images = torch.from_numpy(digits.images).float()[:, None] / 16
slides = HOG()(torch.nn.functional.interpolate(images, size=20, mode="bilinear")).numpy()
diagnoses = np.array(["benign", "in situ", "invasive", "other"])[digits.target]

# %% [markdown]
# The slides of a patient must all be in the same part. `patient` can be text or a number.

# %%
order = rng.permutation(len(slides))
test, public, private = order[:150], order[150:300], order[300:]
private = private[np.argsort(diagnoses[private], kind="stable")]
owners = np.repeat(np.arange(len(private)), rng.integers(1, 7, len(private)))[: len(private)]
owners = [f"patient {owner} {diagnosis}" for owner, diagnosis in zip(owners, diagnoses[private], strict=True)]
FOLDER.mkdir(parents=True, exist_ok=True)
for part, rows in (("private", private), ("public", public), ("test", test)):
    table = {"embedding": pyarrow.array(list(slides[rows])), "diagnosis": diagnoses[rows]}
    table |= {"patient": owners} if part == "private" else {}
    pyarrow.parquet.write_table(pyarrow.table(table), FOLDER / f"{part}.parquet")

# %% [markdown]
# With `unit: person`, ε holds for all slides of a patient, not for a single slide. The number of patients is a public
# constant.

# %%
pl.seed_everything(0)
data = TextDataModule(FOLDER, text="embedding", label="diagnosis", person="patient")
found = recommend(data, epsilon=EPSILON, private_records=len(set(owners)), unit="person")
student, labeling = found.build()
trainer = pl.Trainer(
    max_epochs=found.max_epochs,
    callbacks=[labeling],
    enable_progress_bar=False,
    default_root_dir="runs/patients",
)
trainer.fit(student, data)
accuracy = trainer.test(student, data, verbose=False)[0]["test/accuracy"]
epsilon, unit = labeling.epsilon, labeling.budget.unit
print(f"ε = {epsilon:.3f} for a {unit}: test accuracy of the student {accuracy:.3f}")

# %% [markdown]
# The model is one file that needs torch alone, beside its privacy card.

# %%
print(export_run(labeling.run_dir, labeling.run_dir / "export"))
