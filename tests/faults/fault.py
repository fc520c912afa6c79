"""What a fault is: a change of one decision in the source, and the tests that have to notice it."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

PACKAGE = "pl_privknn"


class FaultError(Exception):
    """A fault that no longer fits the source or the tests; the catalogue is to be mended."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One privacy fault.

    Attributes:
        name: for the table and ``--only``.
        harm: what it would do to people.
        module: dotted import path of the module that it is put into.
        change: old text to new text, each old text exactly once in the module.
        tests: tests that have to notice it, ``file::test`` without folder and ending, so that files may move.
            The quickest one; others often notice it too.
    """

    name: str
    harm: str
    module: str
    change: dict[str, str]
    tests: tuple[str, ...]

    def source(self, root: Path) -> Path:
        """The module's file in the tree at ``root``.

        Raises:
            FaultError: if there is no such module.
        """
        stem = root.joinpath(*self.module.split("."))
        found = [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
        if not found or not self.module.startswith(f"{PACKAGE}."):
            raise FaultError(f"{self.name}: there is no module {self.module}; has it moved?")
        return found[0]

    def applied(self, text: str) -> str:
        """``text`` with the fault in it.

        Raises:
            FaultError: if an old text is not there exactly once, or the result is no Python.
        """
        for old, new in self.change.items():
            if (found := text.count(old)) != 1:
                raise FaultError(f"{self.name}: {old!r} is {found} times in {self.module}; want it once")
            text = text.replace(old, new)
        try:
            compile(text, self.module, "exec")
        except SyntaxError as error:
            raise FaultError(f"{self.name}: {self.module} is no Python any more: {error}") from error
        return text

    def node_ids(self, tests: Path) -> list[str]:
        """pytest's names of :attr:`tests`, relative to the folder above ``tests``.

        Raises:
            FaultError: if a test is not there.
        """
        found = []
        for name in self.tests:
            stem, _, test = name.partition("::")
            files = list(tests.rglob(f"{stem}.py"))
            if len(files) != 1 or test.partition("[")[0] not in _tests_in(files[0]):
                raise FaultError(f"{self.name}: there is no test {name}; has it moved?")
            found.append(f"{files[0].relative_to(tests.parent).as_posix()}::{test}")
        return found


def _tests_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
