"""What a check that fails raises."""


class LabelerCheckError(AssertionError):
    """A labeler breaks a promise; the message names the check, the tables and the amounts, in one line."""
