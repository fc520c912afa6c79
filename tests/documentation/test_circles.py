"""Circles of files, those that imports within functions and lazily loaded names close included."""

import ast
import graphlib
import importlib.util
from pathlib import Path

import grimp

PACKAGE = "pl_privknn"


def lazy_names(graph, module):
    """Modules of the names that a file takes from packages that load them on first use."""
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
            package = importlib.import_module(node.module)
            if hasattr(package, "__getattr__"):
                origins = (getattr(getattr(package, name.name), "__module__", None) for name in node.names)
                yield from (origin for origin in origins if origin in graph.modules)


def test_no_file_imports_itself_through_others():
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    imports = {
        module: graph.find_modules_directly_imported_by(module) | set(lazy_names(graph, module))
        for module in graph.modules
    }
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError with the circle
