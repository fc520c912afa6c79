"""``privknn compare``: methods on the same data, over values of ε and seeds.

:func:`pl_privknn.comparison.run.run_comparison` runs one; what is here reads comparisons and their results.
"""

from pl_privknn.comparison.run import Comparison, read_comparison, read_results
from pl_privknn.comparison.table import Result, markdown_table

__all__ = ["Comparison", "Result", "markdown_table", "read_comparison", "read_results"]
