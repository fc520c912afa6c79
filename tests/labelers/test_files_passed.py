"""Through how many files must a reader go to follow one batch of answers?"""

import sys
from pathlib import Path

import torch

import pl_privknn
from pl_privknn.labelers import PrivateKNN, Screening
from pl_privknn.privacy import Gaussian, Ledger

ROOT = Path(pl_privknn.__file__).resolve().parent
#: Runs within import statements.
IMPORTS = "_moved.py"


def files_passed(call):
    """Files of the package in which a function runs during ``call()``."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and ROOT in path.parents:
            found.add(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found - {IMPORTS}


def test_one_batch_passes_sixteen_files(tmp_path):
    generator = torch.Generator().manual_seed(0)
    table, labels = torch.randn(400, 8, generator=generator), torch.arange(400) % 10
    # Noise of no other test, so that no charge is known already.
    teacher = PrivateKNN(50, 0.3, Screening(10.0, 20.125), Gaussian(20.375))
    teacher.fit(table, labels, 10)
    run = Ledger(tmp_path / "ledger.sqlite", max_epsilon=1000.0).run("run", plan=teacher.plan(40, 40, 10))
    releases = []
    queries = torch.randn(20, 8, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads would not be seen
    try:
        passed = files_passed(lambda: releases.append(teacher.label(queries, run)))
    finally:
        torch.set_num_threads(threads)
    assert releases[0].answered.any()
    assert run.num_charges == 2
    assert {"neighbors/poisson.py", "privacy/ledger/store.py", "privacy/mechanisms/gaussian.py"} < passed
    assert len(passed) <= 16, sorted(passed)
