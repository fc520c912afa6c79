"""Entry point of one run of ``privknn compare``: ``python -m pl_privknn.cli.worker [MODULES] FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from pl_privknn.cli.main import main
from pl_privknn.comparison.runner import work

if __name__ == "__main__":
    *modules, folder = sys.argv[1:]
    sys.path += modules  # after installed packages
    sys.exit(work(Path(folder), main))
