"""What the tests of teachers that release statistics share: tables, and the teachers."""

import copy

import torch

from pl_privknn.features.private_records import PrivateRecords
from pl_privknn.labelers import PreconditionedGradients, SufficientStatistics
from pl_privknn.labelers.released_sums import CENTRE, step_for
from tests.setup.grouped import grouped


def table(count=60, dimension=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = 2 * torch.randn(3, dimension, generator=torch.Generator().manual_seed(9))
    return centres[labels] + torch.randn(count, dimension, generator=generator), labels


#: Attributes of a record of each class: none, all, and some.
ATTRIBUTES = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 1]])


def labels_for(teacher, classes):
    """Labels as a teacher takes them."""
    return ATTRIBUTES[classes] if teacher.tasks == ("multilabel",) else classes


def fitted(teacher, features=None, classes=None, public=None, owners=None):
    public = table(40, seed=7)[0] if public is None else public
    features, classes = table() if features is None else (features, classes)
    labels = labels_for(teacher, classes)
    teacher.fit(PrivateRecords.of(features, labels, 3, public=public, owners=owners))
    return teacher


def exact_sum(teacher, number, weights):
    """The sum of a release without noise, float64."""
    mechanism_step = step_for(1.0) if number == CENTRE else teacher.step(number)
    return teacher.whole_sum(number, weights).double() * mechanism_step


def with_table(teacher, features, labels):
    """A shallow copy with another table, each of whose records is a person's only one."""
    made = copy.copy(teacher)
    made._table = features, labels, 3
    made._persons = None if teacher._persons is None else torch.arange(len(features))
    return made


_OF_CLASSES = {
    "class sums": lambda **given: SufficientStatistics(
        **grouped(SufficientStatistics, private_records=60, **given)
    ),
    "likelihood": lambda **given: SufficientStatistics(
        fit="maximum_likelihood", components=3, **grouped(SufficientStatistics, private_records=60, **given)
    ),
    "curvature": lambda **given: PreconditionedGradients(
        **grouped(PreconditionedGradients, **{"private_records": 60, "releases": 4, **given})
    ),
}


def _of_attributes(make):
    return lambda **given: make(task="multilabel", **given)


MADE = {
    **_OF_CLASSES,
    **{f"{name} of attributes": _of_attributes(make) for name, make in _OF_CLASSES.items()},
}
