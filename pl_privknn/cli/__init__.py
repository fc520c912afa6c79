"""The ``privknn`` command."""

from pl_privknn.cli.main import main

__all__ = ["main"]
