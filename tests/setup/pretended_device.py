"""A device other than the CPU, pretended: tensors "on cuda" lie on the CPU, and refuse to meet those that say so."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# May take tensors of two devices: what is copied from, and what indexes.
_MAY_MIX = ("copy_", "__getitem__", "__setitem__")
_MOVES = ("to", "cpu")
_PRODUCTS = ("addmm", "mm", "matmul", "__matmul__")


class Elsewhere(Tensor):
    """A tensor of the pretended device."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class PretendedDevice(TorchFunctionMode):
    """While it is entered, ``"cuda"`` works as a device that has float64.

    Attributes:
        products: matrix products made there.
        sent: numbers that were moved there.
    """

    def __init__(self):
        super().__init__()
        self.products = self.sent = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        there = any(isinstance(tensor, Elsewhere) for tensor in tensors)
        if function == torch.Tensor.device.__get__:
            return CUDA if there else CPU
        if there and name in ("numpy", "__array__"):
            raise TypeError("can't convert a tensor of another device to numpy")
        if there and name not in (*_MOVES, *_MAY_MIX):
            assert all(isinstance(tensor, Elsewhere) or tensor.ndim == 0 for tensor in tensors), (
                f"{name} mixes devices"
            )
        self.products += there and name in _PRODUCTS
        named = [
            kwargs.pop("device", None),
            *(arg for arg in args[1:] if isinstance(arg, torch.device | str)),
        ]
        if name == "cpu" or (name == "to" and named[-1] is not None):
            come_from = there
            there = name == "to" and torch.device(named[-1]).type == "cuda"
            self.sent += (there and not come_from) * tensors[0].numel()
            args = tuple(CPU if isinstance(arg, torch.device | str) else arg for arg in args)
        elif named[0] is not None:
            there = torch.device(named[0]).type == "cuda"
        args, kwargs = tree_map_only(Elsewhere, lambda tensor: tensor.as_subclass(Tensor), (args, kwargs))
        result = function(*args, **kwargs)
        return tree_map_only(
            Tensor, lambda tensor: tensor.as_subclass(Elsewhere if there else Tensor), result
        )
