"""Data modules that split a data set into private, public and test images.

All of them are imported here, so that a command line knows them by their bare names; what is heavy
(torchvision, scikit-learn, Pillow) is imported when data is read.
"""

from pl_privknn.datamodules.arrays import ArraysDataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import LabeledImages, PublicDataset
from pl_privknn.datamodules.digits import DigitsDataModule
from pl_privknn.datamodules.embeddings import EmbeddingsDataModule
from pl_privknn.datamodules.image_folder import ImageFolderDataModule
from pl_privknn.datamodules.images import ImageStore, TensorImages
from pl_privknn.datamodules.loading import NoLabeledExamplesError
from pl_privknn.datamodules.mnist import FashionMNISTDataModule, MNISTDataModule

__all__ = [
    "ArraysDataModule",
    "DigitsDataModule",
    "EmbeddingsDataModule",
    "FashionMNISTDataModule",
    "ImageFolderDataModule",
    "ImageStore",
    "LabeledImages",
    "MNISTDataModule",
    "NoLabeledExamplesError",
    "PrivatePublicDataModule",
    "PublicDataset",
    "TensorImages",
]
