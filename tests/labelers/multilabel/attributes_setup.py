"""Teachers of attributes, by the arguments that matter in tests."""

from pl_privknn.labelers import PATE, Attributes, PrivateKNN, ReverseKNN
from pl_privknn.privacy import Budget


def attribute_knn(k=300, sampling_rate=0.15, tau=3.0, noise=None, rule=None, **given):
    return PrivateKNN(
        k, sampling_rate, noise=noise, attributes=Attributes(tau, rule), **{"task": "multilabel", **given}
    )


def attribute_pate(
    num_teachers=250, teachers=None, partitioner=None, tau=3.0, noise=None, rule=None, **given
):
    return PATE(
        num_teachers,
        teachers,
        partitioner,
        noise=noise,
        task="multilabel",
        attributes=Attributes(tau, rule),
        **given,
    )


def attribute_reverse_knn(k=1, tau=3.0, noise=None, rule=None, adjacency="add_remove", **given):
    given.setdefault("budget", Budget(given.pop("epsilon", None), adjacency=adjacency))
    return ReverseKNN(k, noise, task="multilabel", attributes=Attributes(tau, rule), **given)
