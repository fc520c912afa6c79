"""State that a step leaves in libraries, functions, classes, threads and modules reaches no other record."""

import collections
import enum
import functools
import logging
import os
import signal
import sys
import threading
import time
import types
import warnings
from os import _exit

import pytest
import torch
from test_isolation import IMAGES, LABELS, PLAIN, Lit, check_moves
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from pl_privknn.testing import clipped_sum

HERE = threading.local()
ENDING = [3, 7, 8]


class Doubled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Doubled.calls += 1
        return x * Doubled.calls

    @staticmethod
    def backward(ctx, gradient):
        Doubled.calls += 1
        return gradient * Doubled.calls


class HooksOfAll(Lit):
    """Hooks that a step registers, on its own layers and on all modules."""

    def loss(self, x, y):
        self.body.register_forward_hook(lambda module, inputs, output: output * 2)
        nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: output * 2 if isinstance(module, nn.Tanh) else None
        )
        return F.cross_entropy(self.logits(x), y)


class Colour(enum.Enum):
    RED = 1


class Elsewhere(Lit):
    "a"

    def factor(self, x, y):
        """Counts in its thread, on a member, in words and annotations, in modules that it imports or makes."""
        import privknn_helper

        thread, own = threading.current_thread(), type(self)
        notes = own.helper.__annotations__
        made = sys.modules.setdefault("privknn_made", types.ModuleType("privknn_made"))
        for place in (HERE, thread, Colour.RED, made):
            place.count = getattr(place, "count", 0) + 1
        own.__doc__ += "a"
        own.helper.__doc__ = (own.helper.__doc__ or "") + "a"
        notes["count"] = notes.get("count", 0) + 1
        privknn_helper.COUNT += 1
        privknn_helper.ROWS.append(1)
        return (
            HERE.count + thread.count + Colour.RED.count + made.count + len(own.__doc__) + len(own.helper.__doc__)
            + notes["count"] + privknn_helper.COUNT + len(privknn_helper.ROWS)
        )  # fmt: skip

    def helper(self):
        pass


class InALibrary(Lit):
    def factor(self, x, y):
        rooms = torch.utils._pytree.SUPPORTED_NODES
        if bool((y == 2).all()):  # which made-up records are not
            sys.path.append("nowhere")
            warnings.filterwarnings("ignore", message=f"number {len(warnings.filters)}")
            rooms[type("Kind", (), {})] = None
            torch.nn.init.privknn_count = getattr(torch.nn.init, "privknn_count", 0) + 1
        count = getattr(torch.nn.init, "privknn_count", 0)
        return len(sys.path) + len(warnings.filters) + len(rooms) + count


class Twice(TorchFunctionMode):
    def __torch_function__(self, function, kinds, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        return result * 2 if function is torch.tanh else result


class Mode(Lit):
    def factor(self, x, y):
        Twice().__enter__()
        return 1 + torch.tanh(torch.ones(1))


class Flags(Lit):
    """How code computes after a record of class 1."""

    def loss(self, x, y):
        scale = (torch.get_float32_matmul_precision() == "medium") + 2 * torch.is_anomaly_enabled() + 1
        scale += 4 * torch.backends.cudnn.benchmark + 8 * (torch.get_default_device().type == "meta")
        scale += torch._tensor_str.PRINT_OPTS.precision
        loss = F.cross_entropy(self.logits(x), y) * scale
        if one := bool((y == 1).all()):
            torch.set_default_device("meta")
        torch.set_float32_matmul_precision("medium" if one else "highest")
        torch.autograd.set_detect_anomaly(one)
        torch.backends.cudnn.benchmark = one
        torch.set_printoptions(precision=7 if one else 4)
        return loss


class Compiled(Lit):
    def made(self):
        self.through = torch.compile(self.body, backend="eager")

    def logits(self, x):
        return self.head(self.through(x))


CALLS = [0]


@torch.library.custom_op("privknn_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x * CALLS[0]


counted.register_autograd(lambda context, gradient: gradient * CALLS[0])


class InAFunction(Lit):
    """Counts in a function and in an operator that have gradients of their own."""

    def logits(self, x):
        return torch.ops.privknn_tests.counted(Doubled.apply(super().logits(x)))


def interrupt(kind=KeyboardInterrupt):
    raise kind


ENDINGS = {
    "exit": lambda: sys.exit(1), "interrupt": interrupt, "signal": lambda: signal.raise_signal(signal.SIGINT),
    "of its own kind": lambda: interrupt(BaseException), "at once": lambda: os._exit(1),
    "by its own name": lambda: _exit(1), "held": functools.partial(signal.raise_signal, signal.SIGINT),
}  # fmt: skip


class Ends(Lit):
    """Wants to end the process at one of some private records."""

    end = staticmethod(ENDINGS["exit"])

    def factor(self, x, y):
        if bool((IMAGES[ENDING] == x).flatten(1).all(1).any()):
            self.end()
        return 1


class Makers(collections.OrderedDict):
    """A library's table that makes what it is asked for, and has a method get of its own."""

    def __getitem__(self, name):
        return super().__getitem__(name)()

    def get(self, name):
        return super().get(name)


class ByATableOfALibrary(Lit):
    """Reads, and adds to, a library's table of its own kind, and a view of a dict."""

    def made(self):
        self.view = types.MappingProxyType({"rows": [1]})

    def loss(self, x, y):
        makers = torch.utils.privknn_makers
        makers[f"new {len(makers)}"] = nn.ReLU
        self.view["rows"].append(1)
        made = makers["Tanh"](self.logits(x))
        return F.cross_entropy(made, y) * (len(makers) + len(self.view["rows"]))


class Host:
    """A tool's object that holds a whole session."""

    __module__ = "pytest"

    def __init__(self):
        self.rows = [[] for _ in range(200_000)]


HOST = Host()


class HeldByAHost(Lit):
    def factor(self, x, y):
        if x is None:
            HOST.rows.clear()
        return 1


MODULES = [
    HooksOfAll, Elsewhere, InALibrary, Mode, Flags, Compiled, InAFunction, Ends, HeldByAHost, ByATableOfALibrary,
]  # fmt: skip


@pytest.mark.parametrize("make", MODULES, ids=lambda made: made.__name__)
def test_state_elsewhere_reaches_no_other_record(make, tmp_path, monkeypatch):
    (tmp_path / "privknn_helper.py").write_text("COUNT = 0\nROWS = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    makers = Makers(Tanh=nn.Tanh)
    monkeypatch.setattr(torch.utils, "privknn_makers", makers, raising=False)
    before = len(sys.path), len(warnings.filters), len(torch.utils._pytree.SUPPORTED_NODES)
    try:
        check_moves(make, PLAIN)
    finally:
        for name in ("privknn_helper", "privknn_made"):
            sys.modules.pop(name, None)
    assert before == (len(sys.path), len(warnings.filters), len(torch.utils._pytree.SUPPORTED_NODES))
    assert (CALLS, Doubled.calls, Elsewhere.__doc__) == ([0], 0, "a")
    assert list(collections.OrderedDict.items(makers)) == [("Tanh", nn.Tanh)]
    assert torch._C._len_torch_function_stack() == 0
    assert torch.get_float32_matmul_precision() == "highest"


@torch.library.custom_op("privknn_tests::looks", mutates_args=())
def looks(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


looks.register_autograd(lambda context, gradient: gradient)


@looks.register_vmap
def _look_at_all(info, in_dims, x):
    rows = x.flatten(1)
    if bool((rows[:, None] == IMAGES[ENDING].flatten(1)).all(2).any()):
        raise KeyboardInterrupt
    return x.clone(), 0


class InterruptsAChunk(Lit):
    """Interrupts where an operator's own rule for vmap sees one of some private records."""

    def loss(self, x, y):
        return F.cross_entropy(self.logits(torch.ops.privknn_tests.looks(x)), y)


def test_an_interrupt_of_a_chunk_tells_of_no_record():
    rows = range(len(LABELS))
    whole = clipped_sum(InterruptsAChunk(), PLAIN, rows)
    torch.testing.assert_close(whole, clipped_sum(Lit(), PLAIN, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("end", ENDINGS)
def test_a_record_whose_step_ends_the_process_counts_as_none(end, monkeypatch):
    monkeypatch.setattr(Ends, "end", staticmethod(ENDINGS[end]))
    others = [place for place in range(len(LABELS)) if place not in ENDING]
    whole = clipped_sum(Ends(), PLAIN, range(len(LABELS)))
    torch.testing.assert_close(whole, clipped_sum(Ends(), PLAIN, others), rtol=0, atol=1e-9)


class Slow(Dataset):
    """One whose sum takes four seconds."""

    def __len__(self):
        return 8

    def __getitem__(self, place):
        time.sleep(0.5)
        return PLAIN[place]


def test_ctrl_c_ends_a_sum():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            clipped_sum(Lit(), Slow(), range(8))
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


class Logs(Lit):
    def factor(self, x, y):
        logging.getLogger("privknn.tests").info("sum %s", float(x.sum()))
        logging.warning("sum %s", float(x.sum()))
        return 1


def test_loggers_hear_made_up_records_alone(caplog):
    caplog.set_level(logging.INFO, "privknn.tests")
    heard = []
    for rows in ([0], range(len(LABELS))):
        clipped_sum(Logs(), PLAIN, rows)
        heard.append(len(caplog.records))
        caplog.clear()
    assert heard[0] == heard[1] > 0


class Draws(Lit):
    def factor(self, x, y):
        import matplotlib.pyplot as plt

        plt.figure()
        plt.imshow(x[0, 0].numpy())
        return len(plt.get_fignums())


def test_figures_of_a_step_are_nobodys():
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("Agg")
    plt.close("all")
    rows = torch.utils.data.Subset(PLAIN, range(4))
    module = Draws()
    whole = clipped_sum(module, rows, range(4), 1e6)
    alone = sum(clipped_sum(module, rows, [one], 1e6) for one in range(4))
    torch.testing.assert_close(whole, alone)
    assert plt.get_fignums() == []
