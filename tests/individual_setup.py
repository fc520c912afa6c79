"""What the tests of per-record budgets share."""

import numpy as np

from pl_privknn.privacy.per_record.filter import IndividualFilter

ALL = np.arange(20)


def opened(path, budget=1.0, ids=ALL):
    state = IndividualFilter(budget, path)
    state.add(ids)
    return state
