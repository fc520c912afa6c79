"""Reports: one HTML page of a run or a ledger, with its privacy card."""

from pl_privknn.privacy.card import privacy_card
from pl_privknn.report.page import write_report

__all__ = ["privacy_card", "write_report"]
