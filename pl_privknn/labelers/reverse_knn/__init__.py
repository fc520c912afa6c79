"""Reverse kNN: with a curator, under local and under shuffle privacy."""

from pl_privknn.labelers.reverse_knn.reverse_knn import ReverseKNN

__all__ = ["ReverseKNN"]
