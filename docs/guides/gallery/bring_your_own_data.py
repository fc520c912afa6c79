# %% [markdown]
# # Bring your own data
#
# Arrays are split into a private, a public and a test part; a teacher answers queries about the public part; the
# student that learns from the answers can be released. The arrays of this example are scikit-learn's bundled digits:
# replace them with your own. Run it with `python docs/guides/gallery/bring_your_own_data.py`, or cell by cell in an
# editor that supports `# %%`.

# %%
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits

from pl_privknn import HOG, ArraysDataModule, Budget, Gaussian, PrivateKNN, PrivateLabeler, VATStudent
from pl_privknn.callbacks import ClusterSelection, LabelingOptions

pl.seed_everything(0)
digits = load_digits()
images = torch.from_numpy(digits.images).float()[:, None] / 16  # (n, channels, height, width) in [0, 1]
images = torch.nn.functional.interpolate(images, size=20, mode="bilinear")
labels = torch.from_numpy(digits.target)

# %% [markdown]
# The three parts must not overlap. The data module only compares public with test images: make sure yourself that
# private and public images do not overlap. The number of classes is a public constant and never inferred from private
# labels. `public_truth` is used for evaluation only: omit it if you have no public labels.

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
# The teacher takes the votes of the 60 nearest records of a Poisson sample with rate 0.8, and gives one noisy answer
# for each of 40 clusters of public images. The maximum cost is known before any record is read:

# %%
teacher = PrivateKNN(k=60, sampling_rate=0.8, noise=Gaussian(sigma=8))
labeling = PrivateLabeler(
    teacher,
    queries_per_round=40,
    selection=ClusterSelection(),
    features=HOG(),
    budget=Budget(epsilon=4.0, delta=1e-4),
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
