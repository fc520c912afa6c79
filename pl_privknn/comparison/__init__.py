"""``privknn compare``: many methods on one split of one data set, over values of ε and seeds.

:func:`pl_privknn.comparison.runner.run_comparison` runs it; what is here reads comparisons and their results.
"""

from pl_privknn.comparison.results import Result, read_results
from pl_privknn.comparison.spec import Comparison, Method, read_comparison
from pl_privknn.comparison.table import markdown_table

__all__ = ["Comparison", "Method", "Result", "markdown_table", "read_comparison", "read_results"]
