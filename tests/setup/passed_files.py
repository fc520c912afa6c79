"""Files of the package that a ``privknn fit --data`` passes, its calls of ``read_yaml``, and the data files it opens.

Run in the project's root: ``python -m tests.setup.passed_files``.
"""

import collections
import inspect
import os
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from PIL import Image

TOP = str(Path(__file__).resolve().parents[2])


class Passed:
    """Context that notes what the package does.

    Attributes:
        functions: of each file of the package, the functions that ran; not what an import alone executes.
        opened: how often each file below a folder was opened.
    """

    def __init__(self, folder):
        self.functions, self.opened = collections.defaultdict(collections.Counter), collections.Counter()
        self._folder, self._on = str(folder), False
        sys.addaudithook(self._audit)

    def _audit(self, event, arguments):
        if self._on and event == "open" and str(arguments[0]).startswith(self._folder):
            self.opened[os.path.relpath(str(arguments[0]), self._folder)] += 1

    def _profile(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(TOP):
            path = os.path.relpath(os.path.realpath(code.co_filename), TOP)
            if path.split(os.sep)[0] in ("pl_privknn", "callbacks", "datamodules"):
                self.functions[path][code.co_name] += 1

    def __enter__(self):
        self._on = True
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)
        self._on = False

    def calls(self, file, function):
        """How often a function ran."""
        return self.functions[file][function]


def photographs(folder):
    """A folder of PNG images with a private, a public and a test part."""
    generator = np.random.default_rng(0)
    for part, count in (("private", 30), ("public", 30), ("test", 5)):
        for name in ("light", "dark"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                image = generator.integers(0, 128, (16, 16, 3)) + (127 if name == "light" else 0)
                Image.fromarray(image.astype(np.uint8)).save(folder / part / name / f"{number}.png")
    return folder


def fit_photographs(place):
    """What a ``privknn fit --data`` of a small folder passes."""
    from pl_privknn.cli import main

    data = photographs(Path(place) / "photographs")
    words = [
        "fit",
        "--data",
        str(data),
        "--epsilon",
        "2",
        "--private-records",
        "60",
        "--teacher",
        "ReverseKNN",
    ]
    with Passed(data) as passed:
        status = main([*words, "--trainer.enable_progress_bar=false", "--trainer.max_epochs=1"])
    assert status == 0
    return passed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = fit_photographs(folder)
    for file, functions in sorted(found.functions.items()):
        names = ", ".join(functions) if len(functions) < 5 else ""
        print(f"{file:45} {len(functions):4} functions {names}")
    print(f"{len(found.functions)} files, read_yaml {found.calls('pl_privknn/config.py', 'read_yaml')} times")
    print(f"{len(found.opened)} data files, opened {collections.Counter(found.opened.values())}")
