# %% [markdown]
# # Bring your own data
#
# Arrays become a private, a public and a test part; a teacher answers queries about the public part; the
# student that learns from the answers may be released. Here the arrays are scikit-learn's bundled digits:
# put yours in their place. Run it with `python docs/guides/gallery/bring_your_own_data.py`, or cell by cell in an
# editor that knows `# %%`.

# %%
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits

from pl_privknn import HOG, Gaussian, PrivateKNN, PrivateLabeler, VATStudent
from pl_privknn.callbacks import LabelingBudget, LabelingOptions
from pl_privknn.datamodules import ArraysDataModule

pl.seed_everything(0)
digits = load_digits()
images = torch.from_numpy(digits.images).float()[:, None] / 16  # (n, channels, height, width) in [0, 1]
images = torch.nn.functional.interpolate(images, size=20, mode="bilinear")
labels = torch.from_numpy(digits.target)

# %% [markdown]
# The three parts must not overlap. The data module compares public with test images alone: keep private and public
# images apart yourself. The number of classes is a public constant and never inferred from private labels.
# `public_truth` is for evaluation alone: leave it out where you have none.

# %%
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
private, public, test = order[:1000], order[1000:1500], order[1500:]
data = ArraysDataModule(
    private_images=images[private],
    private_labels=labels[private],
    public_images=images[public],
    public_truth=labels[public],
    test_images=images[test],
    test_labels=labels[test],
    num_classes=10,
    batch_size=32,
    overlap="ignore",  # a few of these digits are both public and in the test set
)

# %% [markdown]
# The teacher: votes of the 60 nearest records among four fifths of them, one noisy answer for each of 40
# clusters of public images. What that costs at most is known before a single record is read:

# %%
teacher = PrivateKNN(k=60, sampling_rate=0.8, noise=Gaussian(sigma=8))
labeling = PrivateLabeler(
    teacher,
    queries_per_round=40,
    selection="clusters",
    features=HOG(),
    budget=LabelingBudget(delta=1e-4, max_epsilon=4.0),
    options=LabelingOptions(progress=False),
)
student = VATStudent(network="small_cnn", num_classes=10, in_channels=1, image_size=20, ema_decay=0.99)
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="auto",
    devices=1,
    callbacks=[labeling],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="runs/own_data",
)
trainer.fit(student, data)
(figures,) = trainer.test(student, datamodule=data, verbose=False)

# %%
accuracy, epsilon = figures["test/accuracy"], labeling.epsilon
print(f"test accuracy {accuracy:.3f} at ε = {epsilon:.2f}, δ = {labeling.delta:g}")
