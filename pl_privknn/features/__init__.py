"""Extractors of features from images and texts."""

from pl_privknn.features.backbone import BackboneFeatures, CheckpointFeatures
from pl_privknn.features.base import Extractor, Pixels
from pl_privknn.features.hog import HOG
from pl_privknn.features.joined import CachedFeatures, JoinedFeatures
from pl_privknn.features.patches import PatchDictionary
from pl_privknn.features.pretrained import TimmFeatures
from pl_privknn.features.public import (
    DefaultFeatures,
    PublicFeatures,
    PublicKernelPCA,
    PublicPCA,
    PublicWhitening,
    Resized,
)
from pl_privknn.features.text import SentenceFeatures, TextExtractor, WordLlamaFeatures

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
    "TextExtractor",
    "TimmFeatures",
    "WordLlamaFeatures",
]
