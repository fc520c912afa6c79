"""Data modules that split a data set into private, public and test images.

All of them are imported here, so that a command line knows them by their bare names; what is heavy
(torchvision, scikit-learn, Pillow) is imported when data is read.
"""

from pl_privknn.datamodules.arrays import ArraysDataModule, DatasetsDataModule, EmbeddingsDataModule
from pl_privknn.datamodules.attribute_sets import CelebADataModule, Market1501DataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.datasets import ImageStore, LabeledImages, PublicDataset, TensorImages
from pl_privknn.datamodules.digits import DigitsDataModule
from pl_privknn.datamodules.folder import ImageFolderDataModule
from pl_privknn.datamodules.loaders import NoLabeledExamplesError
from pl_privknn.datamodules.mnist import (
    FashionMNISTAttributesDataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)
from pl_privknn.datamodules.published import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    DamagedFileError,
    SVHNDataModule,
)
from pl_privknn.datamodules.text import TextDataModule

__all__ = [
    "ArraysDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "CelebADataModule",
    "DamagedFileError",
    "DatasetsDataModule",
    "DigitsDataModule",
    "EmbeddingsDataModule",
    "FashionMNISTAttributesDataModule",
    "FashionMNISTDataModule",
    "ImageFolderDataModule",
    "ImageStore",
    "LabeledImages",
    "MNISTDataModule",
    "Market1501DataModule",
    "NoLabeledExamplesError",
    "PrivatePublicDataModule",
    "PublicDataset",
    "SVHNDataModule",
    "TensorImages",
    "TextDataModule",
]
