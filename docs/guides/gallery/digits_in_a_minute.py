# %% [markdown]
# # Digits in a minute
#
# A private teacher labels scikit-learn's digits, and a student learns from the labels. Run it with
# `python docs/guides/gallery/digits_in_a_minute.py`, or cell by cell in an editor that supports `# %%`.

# %%
import pytorch_lightning as pl

from pl_privknn import HOG, Budget, DigitsDataModule, PrivateLabeler, ReverseKNN, SupervisedStudent
from pl_privknn.callbacks import ClusterSelection, LabelingOptions

pl.seed_everything(0)
data = DigitsDataModule(batch_size=32)  # 1,000 private, 500 public and 297 test images

# %% [markdown]
# Each private record votes once, for the nearest of 40 clusters of public images. The counts are released with noise
# from the operating system's generator. The cost is stated before any record is read; a smaller ε is stronger.

# %%
labeling = PrivateLabeler(
    ReverseKNN(k=1),
    queries_per_round=40,
    selection=ClusterSelection(),
    features=HOG(),
    budget=Budget(epsilon=1.0, delta=1e-4),
    options=LabelingOptions(progress=False),
)
student = SupervisedStudent(network="small_cnn", num_classes=10, in_channels=1, image_size=20, ema_decay=0.99)
trainer = pl.Trainer(
    max_epochs=12,
    accelerator="cpu",
    callbacks=[labeling],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="runs/digits_in_a_minute",
)
trainer.fit(student, data)
(figures,) = trainer.test(student, datamodule=data, verbose=False)

# %%
accuracy, epsilon = figures["test/accuracy"], labeling.epsilon
print(f"test accuracy {accuracy:.3f} at ε = {epsilon:.4f}, δ = {labeling.delta:g}")
