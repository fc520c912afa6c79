"""Process groups of labelling's own: rounds longer than the training's patience, processes that fail or die."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from pl_privknn import _processes as processes
from pl_privknn._processes import ProcessGroup
from tests.privacy.ledger.ledger_setup import needs_fork
from tests.setup.forked import in_group


def run(folder, parts):
    """Each process does its part of one round; what became of it is in a file a process."""

    def member(rank):
        processes._BEAT = 0.05
        dist.init_process_group("gloo")
        group = ProcessGroup(rank, len(parts))
        try:
            outcome = str(group.shared(lambda: parts[rank](group)))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        (folder / f"{rank}").write_text(outcome)
        group.close()

    return in_group(len(parts), member)


def told(folder, rank):
    return (folder / f"{rank}").read_text()


def works_until_stopped(group):
    """As labelling does: some work, then a look whether to go on; a minute at most."""
    for _ in range(600):
        group.check()
        time.sleep(0.1)
    return "went on"


def with_works(place, part):
    return [part, works_until_stopped] if place == 0 else [works_until_stopped, part]


@needs_fork
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_told_once_and_ends_the_others(tmp_path, failing):
    def fail(group):
        raise KeyError("what it was")

    assert run(tmp_path, with_works(failing, fail)) == [0, 0]
    assert told(tmp_path, failing) == "KeyError: 'what it was'"
    said = f"ProcessLostError: labelling failed on global rank {failing}; its own message says why"
    assert told(tmp_path, 1 - failing) == said


@needs_fork
@pytest.mark.parametrize("dying", [0, 1])
def test_a_death_is_noticed_by_the_others(tmp_path, dying):
    def die(group):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    assert sorted(run(tmp_path, with_works(dying, die))) == [-signal.SIGKILL, 0]
    assert "another process of this training ended" in told(tmp_path, 1 - dying)
