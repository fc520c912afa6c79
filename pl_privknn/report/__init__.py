"""Reports: one HTML page of a run or a ledger, and its privacy card."""

from pl_privknn.report.page import privacy_card, write_report

__all__ = ["privacy_card", "write_report"]
