"""Private teachers: one file each, behind :class:`~pl_privknn.labelers.base.Labeler`."""

from pl_privknn.labelers.base import Labeler, Release
from pl_privknn.labelers.private_knn import PrivateKNN, Screening
from pl_privknn.labelers.reverse_knn import ReverseKNN

__all__ = ["Labeler", "PrivateKNN", "Release", "ReverseKNN", "Screening"]
