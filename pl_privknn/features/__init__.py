"""From images to vectors."""

from pl_privknn.features.backbone import BackboneFeatures
from pl_privknn.features.base import Extractor
from pl_privknn.features.hog import HOG
from pl_privknn.features.pretrained import TimmFeatures

__all__ = ["HOG", "BackboneFeatures", "Extractor", "TimmFeatures"]
