# %% [markdown]
# # Vectors of a foundation model, several a patient
#
# The toolkits of medical foundation models write a table: one row a slide, a region or a visit, with a patient,
# a diagnosis, and an embedding, a list of some hundred floats. That table is all that is needed: no image, no
# extractor. Run it with `pip install 'pl-privknn[text]'` and `python examples/patient_vectors.py`.
#
# Here scikit-learn's bundled digits stand in for slides and HOG for the foundation model: patients with one to
# six slides each, all of the patient's class.

# %%
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits

from pl_privknn import HOG, recommend
from pl_privknn.datamodules import TextDataModule

FOLDER = Path("data/patients")
EPSILON = 4.0
rng = np.random.default_rng(0)
digits = load_digits(n_class=4)
images = torch.from_numpy(digits.images).float()[:, None] / 16
slides = HOG()(torch.nn.functional.interpolate(images, size=20, mode="bilinear")).numpy()
diagnoses = np.array(["benign", "in situ", "invasive", "other"])[digits.target]

# %% [markdown]
# A patient's slides must not be split between parts. `patient` may be text or a number.

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
# With `unit: person` ε is for a patient with all slides, not for a slide. The number of patients is a public
# constant.

# %%
pl.seed_everything(0)
data = TextDataModule(FOLDER, text="embedding", label="diagnosis", person="patient")
found = recommend(data, epsilon=EPSILON, private_records=len(set(owners)))
found.config["labeling"]["budget"]["unit"] = "person"
student, labeling = found.build(data)
trainer = pl.Trainer(
    max_epochs=found.max_epochs,
    callbacks=[labeling],
    enable_progress_bar=False,
    default_root_dir="runs/patients",
)
trainer.fit(student, data)
accuracy = trainer.test(student, data, verbose=False)[0]["test/accuracy"]
epsilon, unit = labeling.epsilon, labeling.unit
print(f"ε = {epsilon:.3f} for a {unit}: test accuracy of the student {accuracy:.3f}")
