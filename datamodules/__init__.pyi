from .arrays import (
    ArraysDataModule as ArraysDataModule,
)
from .arrays import (
    DatasetsDataModule as DatasetsDataModule,
)
from .arrays import (
    EmbeddingsDataModule as EmbeddingsDataModule,
)
from .attribute_sets import CelebADataModule as CelebADataModule
from .attribute_sets import Market1501DataModule as Market1501DataModule
from .base import PrivatePublicDataModule as PrivatePublicDataModule
from .datasets import (
    ImageStore as ImageStore,
)
from .datasets import (
    LabeledImages as LabeledImages,
)
from .datasets import (
    PublicDataset as PublicDataset,
)
from .datasets import (
    TensorImages as TensorImages,
)
from .digits import DigitsDataModule as DigitsDataModule
from .folder import ImageFolderDataModule as ImageFolderDataModule
from .loaders import NoLabeledExamplesError as NoLabeledExamplesError
from .mnist import (
    FashionMNISTAttributesDataModule as FashionMNISTAttributesDataModule,
)
from .mnist import (
    FashionMNISTDataModule as FashionMNISTDataModule,
)
from .mnist import (
    MNISTDataModule as MNISTDataModule,
)
from .published import (
    CIFAR10DataModule as CIFAR10DataModule,
)
from .published import (
    CIFAR100DataModule as CIFAR100DataModule,
)
from .published import (
    DamagedFileError as DamagedFileError,
)
from .published import (
    SVHNDataModule as SVHNDataModule,
)
from .tables import TableDataModule as TableDataModule
from .text import TextDataModule as TextDataModule

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
    "TableDataModule",
    "TensorImages",
    "TextDataModule",
]
