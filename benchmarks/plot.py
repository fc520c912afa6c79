"""Draw each stored comparison, test accuracy against ε: plot.py."""

from __future__ import annotations

from render import PLOTS, comparisons

from pl_privknn.comparison import read_results
from pl_privknn.comparison.plot import draw

TITLES = {
    "compare_fashion_mnist": "Fashion-MNIST, 60,000 private records",
    "compare_digits": "Digits, 1,000 private records",
}


def main() -> None:
    """Each comparison into ``docs/guides/<its folder>.png`` and ``.svg``."""
    for folder in comparisons():
        draw(read_results(folder), PLOTS / folder.name, TITLES.get(folder.name))


if __name__ == "__main__":
    main()
