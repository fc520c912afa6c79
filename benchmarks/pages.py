"""Write the tables and plots of stored results into README.md and docs/."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from benchmarks import render as readme
from benchmarks.record import ROOT

#: Modules with ``fresh()``: their pages, rendered anew.
MODULES = ("render", "render_docs", "ind_knn_report", "multilabel_rules", "papers")
#: Of those and others, modules with ``draw()``.
DRAWN = ("attack_pages", "ind_knn_report", "reverse_knn_local")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`render`."""
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where a page or plot is old")


def render(options: argparse.Namespace) -> int:
    """Render all pages and plots, or name those that differ from what is stored."""
    old = [page for name in MODULES for page in update(_module(name), write=not options.check)]
    if options.check:
        old += [f"docs/guides/{plot}" for plot in readme.old_plots()]
        for page in old:
            print(f"{page} is not up to date; run python -m benchmarks render")
        return int(bool(old))
    for name in DRAWN:
        _module(name).draw()
    readme.draw_comparisons()
    return 0


def update(module: ModuleType, write: bool) -> list[str]:
    """Pages of a module that differ from their stored results, brought up to date if so wanted."""
    old = []
    for page, text in module.fresh().items():
        if page.read_text(encoding="utf-8") != text:
            old.append(str(page.relative_to(ROOT)))
            if write:
                page.write_text(text, encoding="utf-8")
    return old


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")
