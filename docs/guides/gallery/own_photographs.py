# %% [markdown]
# # A folder of photographs
#
# Photographs are organised in folders: `private/<class>/`, `public/` without labels, and `test/<class>/`. This
# example uses crops of the two photographs that come with scikit-learn, a temple and a flower: replace them with your
# own folder. Run it with `python docs/guides/gallery/own_photographs.py`, or cell by cell in an editor that supports
# `# %%`.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from pl_privknn import (
    Budget,
    ClusterSelection,
    ImageFolderDataModule,
    LabelingOptions,
    Pixels,
    PrivateLabeler,
    ReverseKNN,
    SupervisedStudent,
)

pl.seed_everything(0)
folder, side = Path("photographs"), 48
rng = np.random.default_rng(0)
for name, photograph in zip(("temple", "flower"), load_sample_images().images, strict=True):
    # Thirds of a photograph, so that no pixel is in two parts.
    width = photograph.shape[1] // 3
    for third, (part, number) in enumerate((("private", 150), ("public", 60), ("test", 40))):
        place = folder / part if part == "public" else folder / part / name
        place.mkdir(parents=True, exist_ok=True)
        for i in range(number):
            top = rng.integers(photograph.shape[0] - side)
            left = third * width + rng.integers(width - side)
            Image.fromarray(photograph[top : top + side, left : left + side]).save(place / f"{name}-{i}.png")

# %% [markdown]
# The class names are public. Files are read when they are needed; messages never name a private file.

# %%
data = ImageFolderDataModule(folder, image_size=16, class_names=["temple", "flower"], batch_size=30)

# %% [markdown]
# With only 300 private photographs, each one votes once, for the nearest of ten clusters of public photographs.

# %%
labeling = PrivateLabeler(
    ReverseKNN(k=1),
    queries_per_round=10,
    selection=ClusterSelection(),
    features=Pixels(),
    budget=Budget(epsilon=1.0, delta=1e-4),
    options=LabelingOptions(progress=False),
)
student = SupervisedStudent(network="small_cnn", num_classes=2, in_channels=3, image_size=16, ema_decay=0.9)
trainer = pl.Trainer(
    max_epochs=12,
    accelerator="cpu",
    callbacks=[labeling],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="runs/own_photographs",
)
trainer.fit(student, data)
(figures,) = trainer.test(student, datamodule=data, verbose=False)

# %%
accuracy, epsilon = figures["test/accuracy"], labeling.epsilon
print(f"test accuracy {accuracy:.3f} at ε = {epsilon:.4f}, δ = {labeling.delta:g}")

# %% [markdown]
# What the student says of photographs of the test set; wrong answers are red:

# %%
chosen = torch.randperm(len(data.test))[:12]
photographs, truth = data.test.images(chosen), data.test.labels[chosen]
with torch.no_grad():
    answers = student.eval()(photographs).argmax(dim=1)
figure, axes = plt.subplots(2, 6, figsize=(9, 3.4))
for place, photograph, answer, label in zip(axes.flat, photographs, answers, truth, strict=True):
    place.imshow(photograph.permute(1, 2, 0))
    place.set_title(data.class_names[answer], color="black" if answer == label else "red")
    place.axis("off")
figure.savefig("own_photographs.png")
