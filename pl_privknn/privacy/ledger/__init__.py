"""The ledger: what was promised and what was paid, on disk before any noise is drawn."""

from pl_privknn.privacy.ledger.budget import BudgetExceeded, LedgerReport
from pl_privknn.privacy.ledger.ledger import Ledger
from pl_privknn.privacy.ledger.run import LedgerRun
from pl_privknn.privacy.ledger.store import LedgerCorrupt

__all__ = ["BudgetExceeded", "Ledger", "LedgerCorrupt", "LedgerReport", "LedgerRun"]
