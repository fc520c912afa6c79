"""Configurations as ``privknn fit`` reads them, without a run; its parser takes longer to make than to use."""

import functools
from pathlib import Path

import pytest

from pl_privknn.cli import main
from pl_privknn.cli.train import PrivKNNCLI

SOME = Path(__file__).resolve().parents[2] / "configs" / "digits_private_knn.yaml"


class _Stop(BaseException):
    pass


@functools.cache
def _command():
    made = []

    def keep(cli, parser, args):
        made.append((cli, parser))
        raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivKNNCLI, "parse_arguments", keep)
        with pytest.raises(_Stop):
            main(["fit", "--config", str(SOME)])
    return made[0]


def understood(config):
    """What the command makes of a file; an error where it would refuse it."""
    cli, parser = _command()
    cli.parse_arguments(parser, ["--config", str(config)])
    return cli.config
