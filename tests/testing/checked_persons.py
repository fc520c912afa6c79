"""Assertions about persons in a report of check_labeler, shared by its tests."""


def check_persons_move(report):
    """Assert that a person moves a release as far as it is paid for, or nearly so: the bound is no empty one."""
    for key in [key for key in report.largest if key.endswith(", persons")]:
        persons, records = report.largest[key], report.largest[key.removesuffix(", persons")]
        assert persons.pairs > 5
        assert persons.moves.keys() == records.moves.keys()
        for kind, move in persons.moves.items():
            assert move.amount > 0.9 * min(move.allowed, records.moves[kind].amount)
