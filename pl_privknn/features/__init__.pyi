from .backbone import BackboneFeatures as BackboneFeatures
from .backbone import CheckpointFeatures as CheckpointFeatures
from .base import Extractor as Extractor
from .base import Pixels as Pixels
from .hog import HOG as HOG
from .joined import CachedFeatures as CachedFeatures
from .joined import JoinedFeatures as JoinedFeatures
from .patches import PatchDictionary as PatchDictionary
from .pretrained import TimmFeatures as TimmFeatures
from .public import (
    DefaultFeatures as DefaultFeatures,
)
from .public import (
    PublicFeatures as PublicFeatures,
)
from .public import (
    PublicKernelPCA as PublicKernelPCA,
)
from .public import (
    PublicPCA as PublicPCA,
)
from .public import (
    PublicWhitening as PublicWhitening,
)
from .public import (
    Resized as Resized,
)
from .table import TableFeatures as TableFeatures
from .text import (
    SentenceFeatures as SentenceFeatures,
)
from .text import (
    TextExtractor as TextExtractor,
)
from .text import (
    WordLlamaFeatures as WordLlamaFeatures,
)

__all__ = [
    "HOG",
    "BackboneFeatures",
    "CachedFeatures",
    "CheckpointFeatures",
    "DefaultFeatures",
    "Extractor",
    "JoinedFeatures",
    "PatchDictionary",
    "Pixels",
    "PublicFeatures",
    "PublicKernelPCA",
    "PublicPCA",
    "PublicWhitening",
    "Resized",
    "SentenceFeatures",
    "TableFeatures",
    "TextExtractor",
    "TimmFeatures",
    "WordLlamaFeatures",
]
