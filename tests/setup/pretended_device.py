"""A device other than the CPU, pretended: tensors "on cuda" lie on the CPU, and refuse to meet those that say so."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
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


class Far(Tensor):
    """A tensor of the device of :class:`DispatchedDevice`: one that autograd and tracing take for another one."""

    @staticmethod
    def __new__(cls, inner):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device=FAR)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return DispatchedDevice.entered.run(operator, args, kwargs or {})


FAR = torch.device("meta")
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")


class DispatchedDevice(TorchDispatchMode):
    """While it is entered, ``FAR`` works as a device that refuses operators on tensors of two devices.

    Attributes:
        waits: how often the host waited for the device: for values, for shapes that follow from values, for copies.
    """

    entered = None

    def __init__(self):
        super().__init__()
        self.waits = 0

    def __enter__(self):
        DispatchedDevice.entered = self
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return self.run(operator, args, kwargs or {})

    def run(self, operator, args, kwargs):
        """Result of an operator, on the device of its tensors, or on that which its arguments name."""
        name = operator._schema.name.removeprefix("aten::")
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        far = [isinstance(tensor, Far) for tensor in tensors]
        there, moves = any(far), name in ("_to_copy", "copy_")
        if name == "copy_":
            goes = isinstance(args[0], Far)
        elif (name == "_to_copy" or not tensors) and kwargs.get("device") is not None:
            goes = kwargs["device"] == FAR
        else:
            goes = there
            mixed = there and not all(at or one.ndim == 0 for at, one in zip(far, tensors, strict=True))
            assert not mixed or name.startswith("index"), f"{name} mixes devices"
        masked = name.startswith("index") and any(one.dtype is torch.bool for one in tensors[1:])
        self.waits += there and (name in _WAITS or masked)
        self.waits += moves and not all(at == goes for at in far)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": CPU}
        result = operator(
            *tree_map_only(Far, lambda one: one.inner, args),
            **tree_map_only(Far, lambda one: one.inner, kwargs),
        )
        return tree_map_only(
            Tensor, lambda one: Far(one) if goes and not isinstance(one, Far) else one, result
        )
