"""What is a user's mistake, told in one line, and what is a fault in code, whose traceback is wanted."""

import pytest
import torch

from pl_privknn.cli.common import mistake
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import IndKNN, PrivateKNN
from pl_privknn.privacy.ledger import Ledger
from pl_privknn.privacy.private_store import PrivateStoreError


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        function()
    return caught.value


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda: IndKNN(0.5, 0.5, epsilon=-1.0), "epsilon=-1.0"),
        (lambda: PrivateKNN(k=0), "k=0"),
        (lambda: IndKNN(0.5, 0.5, 1.0).label(torch.ones(1, 2), None), "call fit"),
        (lambda: Ledger("unused", delta=2.0), "delta=2.0"),
        (lambda: ArraysDataModule("x.npy", [0], "y.npy", num_classes=2), "x.npy"),
    ],
)
def test_what_any_room_of_the_package_refuses_is_a_mistake(function, word):
    assert word in mistake(raised(function))


def test_own_exceptions_and_the_disks_are_mistakes_and_other_code_is_not():
    assert mistake(PrivateStoreError("the budgets\nare older")) == "the budgets are older"
    assert mistake(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    assert mistake(raised(lambda: torch.ones(2) @ torch.ones(3))) is None
    assert mistake(raised(lambda: int("seven"))) is None
    assert mistake(raised(lambda: int("seven")), anywhere=True).startswith("ValueError: ")
