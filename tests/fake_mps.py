"""A stand-in for Apple's GPU on any machine: tensors that say they are there, and refuse what those refuse.

They hold CPU data. Refused are float64, numpy, and operations together with tensors of the CPU. It cannot tell
whether a real GPU has every operation, or how fast it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

MPS = torch.device("mps")
FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _on_mps(device: Any) -> bool:
    return device is not None and not isinstance(device, Tensor) and str(device).startswith("mps")


def _devices(arguments: Any) -> Iterator[Any]:
    for value in tree_iter(arguments):
        if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "mps")):
            yield value


class OnMps(Tensor):
    """A tensor on the stand-in."""

    threads: set[int] = set()  # those that have computed convolutions

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__" and function.__self__ is Tensor.device:
            return MPS
        if name == "_has_compatible_shallow_copy_type" or (name == "__get__" and function.__self__ is Tensor.is_cpu):
            return False
        if function is Tensor.double or any(value is torch.float64 for value in tree_iter((args, kwargs))):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert mps:0 device type tensor to numpy.")
        if name == "__deepcopy__":
            copied = args[1][id(args[0])] = args[0].detach().clone()
            copied._is_param = getattr(args[0], "_is_param", False)  # how torch knows a parameter
            return copied
        leaves = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        leaving = function is Tensor.cpu
        if name == "to":
            others = [value for value in leaves[1:] if not isinstance(value, OnMps)]
            leaving = bool(others) or any(not _on_mps(device) for device in _devices((args[1:], kwargs)))
        elif any(not isinstance(value, OnMps) and value.ndim for value in leaves):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found mps:0 and cpu in {name}.")
        if name == "conv2d":
            cls.threads.add(threading.get_ident())

        def here(value: Any) -> Any:
            return "cpu" if _on_mps(value) else value

        with torch._C.DisableTorchFunctionSubclass():
            found = function(*tree_map(here, args), **tree_map(here, kwargs))
            if leaving:
                return found.as_subclass(Tensor)
            return tree_map(lambda value: value.as_subclass(cls) if type(value) is Tensor else value, found)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let torch have an Apple GPU."""
    import testtime.encoding.encoders.tiny  # noqa: F401, first: torch looks into what is replaced here when it is imported

    usual = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self, OnMps) or not any(_on_mps(device) for device in _devices((args, kwargs))):
            return usual(self, *args, **kwargs)
        stay = tree_map(lambda value: "cpu" if _on_mps(value) else value, (args, kwargs))
        return usual(self.detach(), *stay[0], **stay[1]).clone().as_subclass(OnMps)

    def factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if not _on_mps(device):
                return make(*args, device=device, **kwargs)
            return make(*args, **kwargs).to(MPS)

        return made

    OnMps.threads = set()
    patch.setattr(torch.backends.mps, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setattr(Tensor, "to", to)
    for name in FACTORIES:
        patch.setattr(torch, name, factory(getattr(torch, name)))
