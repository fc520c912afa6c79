"""Data modules: private, public and test images, and the loaders of the public part."""

from pl_privknn.datamodules.arrays import ArraysDataModule
from pl_privknn.datamodules.base import PrivatePublicDataModule
from pl_privknn.datamodules.digits import DigitsDataModule
from pl_privknn.datamodules.image_folder import ImageFolderDataModule
from pl_privknn.datamodules.mnist import FashionMNISTDataModule, MNISTDataModule

__all__ = [
    "ArraysDataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageFolderDataModule",
    "MNISTDataModule",
    "PrivatePublicDataModule",
]
