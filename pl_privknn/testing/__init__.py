"""For tests of private teachers, the project's and yours: a free ledger and a check of what a labeler promises."""

from pl_privknn.testing.ledger import FreeLedger

__all__ = ["FreeLedger"]
