"""What any teacher may do within an ε, found before anything is asked."""

from pl_privknn.planning.plan import Plan
from pl_privknn.planning.planner import plan, plan_noisy_sgd, plan_private_knn, plan_release, plan_reverse_knn
from pl_privknn.planning.teachers import TEACHERS

__all__ = [
    "TEACHERS",
    "Plan",
    "plan",
    "plan_noisy_sgd",
    "plan_private_knn",
    "plan_release",
    "plan_reverse_knn",
]
