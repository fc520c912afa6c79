"""Ind-KNN: kernel votes with a budget for every private record."""

from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters, IndKNNSwitches, PublicDensity
from pl_privknn.labelers.ind_knn.labeler import IndKNN, RecordBudgets, Records, Similarity
from pl_privknn.labelers.ind_knn.retrieval import Context, Retrieved, VoteRelease, smoothed_votes
from pl_privknn.privacy.record_groups import RecordGroups

__all__ = [
    "Context",
    "IndKNN",
    "IndKNNParameters",
    "IndKNNSwitches",
    "PublicDensity",
    "RecordBudgets",
    "RecordGroups",
    "Records",
    "Retrieved",
    "Similarity",
    "VoteRelease",
    "smoothed_votes",
]
