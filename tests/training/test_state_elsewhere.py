"""State that a step leaves in libraries, functions, classes, threads and modules reaches no other record."""

import collections
import enum
import logging
import os
import signal
import sys
import textwrap
import threading
import time
import types
import warnings

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


class InAFunction(Lit):
    def loss(self, x, y):
        return F.cross_entropy(Doubled.apply(self.logits(x)), y)


class HooksOfAll(Lit):
    """Hooks that a step registers, on its own layers and on all modules."""

    def loss(self, x, y):
        self.body.register_forward_hook(lambda module, inputs, output: output * 2)
        nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: output * 2 if isinstance(module, nn.Tanh) else None
        )
        return F.cross_entropy(self.logits(x), y)


class OfAThread(Lit):
    def loss(self, x, y):
        HERE.count = getattr(HERE, "count", 0) + 1
        thread = threading.current_thread()
        thread.privknn_count = getattr(thread, "privknn_count", 0) + 1
        return F.cross_entropy(self.logits(x), y) * (HERE.count + thread.privknn_count)


class Colour(enum.Enum):
    RED = 1


class OnAMember(Lit):
    def loss(self, x, y):
        Colour.RED.count = getattr(Colour.RED, "count", 0) + 1
        return F.cross_entropy(self.logits(x), y) * Colour.RED.count


class InWords(Lit):
    "a"

    def loss(self, x, y):
        own = type(self)
        own.__doc__ += "a"
        own.helper.__doc__ = (own.helper.__doc__ or "") + "a"
        notes = own.helper.__annotations__
        notes["count"] = notes.get("count", 0) + 1
        return F.cross_entropy(self.logits(x), y) * (
            len(own.__doc__) + len(own.helper.__doc__) + notes["count"]
        )

    def helper(self):
        pass


class InALibrary(Lit):
    def loss(self, x, y):
        rooms = torch.utils._pytree.SUPPORTED_NODES
        if bool((y == 2).all()):  # which made-up records are not
            sys.path.append("nowhere")
            warnings.filterwarnings("ignore", message=f"number {len(warnings.filters)}")
            rooms[type("Kind", (), {})] = None
            torch.nn.init.privknn_count = getattr(torch.nn.init, "privknn_count", 0) + 1
        numbers = (
            len(sys.path) + len(warnings.filters) + len(rooms) + getattr(torch.nn.init, "privknn_count", 0)
        )
        return F.cross_entropy(self.logits(x), y) * numbers


class Imported(Lit):
    """Names of modules that the step imports, or makes."""

    def loss(self, x, y):
        import privknn_helper

        privknn_helper.COUNT += 1
        privknn_helper.ROWS.append(1)
        made = sys.modules.setdefault("privknn_made", types.ModuleType("privknn_made"))
        made.count = getattr(made, "count", 0) + 1
        return F.cross_entropy(self.logits(x), y) * (
            privknn_helper.COUNT + len(privknn_helper.ROWS) + made.count
        )


class Twice(TorchFunctionMode):
    def __torch_function__(self, function, kinds, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        return result * 2 if function is torch.tanh else result


class Mode(Lit):
    def loss(self, x, y):
        Twice().__enter__()
        return F.cross_entropy(self.logits(x), y) * (1 + torch.tanh(torch.ones(1)))


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

    def loss(self, x, y):
        return F.cross_entropy(self.head(self.through(x)), y)


CALLS = [0]


@torch.library.custom_op("privknn_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x * CALLS[0]


counted.register_autograd(lambda context, gradient: gradient * CALLS[0])


class ByAnOperator(Lit):
    def loss(self, x, y):
        return F.cross_entropy(torch.ops.privknn_tests.counted(self.logits(x)), y)


class Ends(Lit):
    """Wants to end the process at one of some private records."""

    def end(self):
        sys.exit(1)

    def loss(self, x, y):
        if bool((IMAGES[ENDING] == x).flatten(1).all(1).any()):
            self.end()
        return F.cross_entropy(self.logits(x), y)


class Interrupts(Ends):
    def end(self):
        raise KeyboardInterrupt


class Signals(Ends):
    def end(self):
        signal.raise_signal(signal.SIGINT)


class OfItsOwnKind(Ends):
    def end(self):
        raise BaseException


class EndsAtOnce(Ends):
    def end(self):
        os._exit(1)


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
    def loss(self, x, y):
        if x is None:
            HOST.rows.clear()
        return F.cross_entropy(self.logits(x), y)


MODULES = [
    InAFunction, HooksOfAll, OfAThread, OnAMember, InWords, InALibrary, Imported, Mode, Flags, Compiled, ByAnOperator,
    Ends, HeldByAHost, ByATableOfALibrary,
]  # fmt: skip


@pytest.mark.parametrize("make", MODULES, ids=lambda made: made.__name__)
def test_state_elsewhere_reaches_no_other_record(make, tmp_path, monkeypatch):
    (tmp_path / "privknn_helper.py").write_text(
        textwrap.dedent("""
        COUNT = 0
        ROWS = []
        """)
    )
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
    assert (CALLS, Doubled.calls, InWords.__doc__) == ([0], 0, "a")
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


@pytest.mark.parametrize("make", [Ends, Interrupts, Signals, OfItsOwnKind, EndsAtOnce])
def test_a_record_whose_step_ends_the_process_counts_as_none(make):
    others = [place for place in range(len(LABELS)) if place not in ENDING]
    whole = clipped_sum(make(), PLAIN, range(len(LABELS)))
    torch.testing.assert_close(whole, clipped_sum(make(), PLAIN, others), rtol=0, atol=1e-9)


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


class Collects(logging.Handler):
    def __init__(self):
        super().__init__()
        self.rows = []

    def emit(self, record):
        self.rows.append(record.getMessage())


class Logs(Lit):
    def loss(self, x, y):
        loss = F.cross_entropy(self.logits(x), y)
        logging.getLogger("privknn.tests").info("loss %s", float(loss))
        logging.warning("loss %s", float(loss))
        return loss


def test_loggers_hear_made_up_records_alone():
    handler, logger = Collects(), logging.getLogger("privknn.tests")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.root.addHandler(handler)
    try:
        clipped_sum(Logs(), PLAIN, [0])
        once, handler.rows = len(handler.rows), []
        clipped_sum(Logs(), PLAIN, range(20))
        assert len(handler.rows) == once
    finally:
        logger.removeHandler(handler)
        logging.root.removeHandler(handler)


class Draws(Lit):
    def loss(self, x, y):
        import matplotlib.pyplot as plt

        plt.figure()
        plt.imshow(x[0, 0].numpy())
        return F.cross_entropy(self.logits(x), y) * len(plt.get_fignums())


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
