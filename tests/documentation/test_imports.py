"""No module of the package imports itself by way of others, and imports within functions are few and known."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Imported on first use, for they are heavy or rarely wanted; the command line (``cli``) defers all that it can.
DEFERRED = {
    "_run_end": {"callbacks.run_report"},  # which knows everything that reports
    "privacy.accounting.exact": {"privacy.accounting.induction"},  # compiles
    "features.hog": {"features.hog_kernel"},  # compiles
    "networks.registry": {"networks.timm_models"},  # timm
    "planning.configuration_plan": {"callbacks", "datamodules.base"},  # Lightning
    "training.clipping": {"training.hooks"},  # Opacus
    "privacy.mechanisms.data_dependent": {"privacy.accounting.data_dependent"},  # imports other mechanisms
}


def _modules():
    found = {}
    for folder in ("pl_privknn", "callbacks", "datamodules"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = (
                path.relative_to(ROOT / "pl_privknn" if folder == "pl_privknn" else ROOT)
                .with_suffix("")
                .parts
            )
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(node, within=False):
    """(module, whether within a function) of every import that runs."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            continue  # expressions hold no imports
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("pl_privknn."):
            module = child.module.removeprefix("pl_privknn.")
            for alias in child.names:
                inner = f"{module}.{alias.name}"
                yield (inner if inner in MODULES else module), within
        yield from _imports(child, within or isinstance(child, ast.FunctionDef))


@functools.cache
def _edges(name):
    imports = _imports(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    return {(target, within) for target, within in imports if target in MODULES and target != name}


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: {target for target, _ in _edges(name)} for name in MODULES}
    assert sum(map(len, graph.values())) > 500
    list(TopologicalSorter(graph).static_order())  # CycleError names a circle


def test_imports_within_functions_are_those_known():
    deferred = {}
    for name in MODULES:
        edges = _edges(name)
        targets = {target for target, within in edges if within and (target, False) not in edges}
        if targets and not name.startswith("cli."):
            deferred[name] = targets
    assert deferred == DEFERRED
