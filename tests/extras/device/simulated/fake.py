"""A CUDA device that is not there: tensors that say ``cuda:0``, hold real values in CPU memory, and
keep accounts.

Inside ``with fake_cuda():``, ``torch.arange(..., device="cuda")``, ``.to("cuda")`` and so on return
a :class:`FakeCudaTensor`. Every operation on one

- is refused if it mixes devices as CUDA would refuse it (:class:`DeviceMix`);
- runs on the CPU tensor inside, so that data-dependent code takes the path that it takes on a GPU;
- is counted, see :mod:`tests.extras.device.simulated.account`. So are kernels of Triton's, in its interpreter.

FakeTensorMode can't do this: it has no values, so that ``bool(t.any())`` and ``nonzero`` raise.

What it is not: all work is done in the order of the calls, except on a stream that sleeps, whose
Triton kernels and lookups wait until someone waits for the stream. The operations for which the host waits are a list (``_WAITS``), which has never been compared with
``torch.cuda.set_sync_debug_mode("error")`` on a GPU. ``bincount`` is one launch here and six there.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock
from weakref import WeakSet

import numpy as np
import torch
import torch.utils._pytree as pytree
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dist_sparse.extras.device import kernels
from tests.extras.device.simulated.account import ACCOUNT, Spent

__all__ = [
    "CUDA",
    "STREAMS",
    "DeviceMix",
    "FakeCudaTensor",
    "Meter",
    "counting",
    "cuda",
    "fake_cuda",
    "inner",
]

CUDA: Final = torch.device("cuda", 0)
aten = torch.ops.aten

Kwargs = Mapping[str, Any]


class DeviceMix(RuntimeError):
    """As CUDA: expected all tensors to be on the same device."""


class FakeCudaTensor(Tensor):
    """A tensor on the device; ``elem`` is the one that holds its values."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> FakeCudaTensor:
        made: FakeCudaTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=CUDA,
            requires_grad=False,
        )
        made.elem = elem
        ACCOUNT.hold(made, elem)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeCuda({self.elem!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:  # NotImplementedError too
            if not any(words in str(error) for words in _UNGUARDED):
                raise
        return _run_unguarded(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


# What torch's bindings say of a device for which a CPU wheel has no guard.
_UNGUARDED: Final = ("not linked with support", "with arguments from the 'CUDA' backend")


def inner(value: Any) -> Any:
    """Return the tensor that holds the values of a tensor on the device; others unchanged."""
    return value.elem if isinstance(value, FakeCudaTensor) else value


def _plain(values: Any) -> Any:
    return pytree.tree_map(inner, values)


def cuda(tensor: Tensor) -> FakeCudaTensor:
    """Return ``tensor``, in the same memory, on the device."""
    return FakeCudaTensor(tensor.detach())


def _wrapped(value: Any) -> Any:
    return FakeCudaTensor(value) if type(value) is Tensor else value


def _is_cuda(device: object) -> bool:
    if device is None:
        return False
    # Numbers are numbers of GPUs.
    return isinstance(device, int) or torch.device(device).type == "cuda"  # type: ignore[call-overload]


def _is_scalar_of_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeCudaTensor) and not value.dim()


# ---- operations

# CUDA takes a scalar tensor of the host beside tensors of its own, except in these.
_STRICT: Final = {
    aten.index_select.default,
    aten.index_fill_.int_Tensor,
    aten.cat.default,
    aten.masked_select.default,
}
_COPIES: Final = {aten._to_copy.default, aten.copy_.default}
# They reserve memory, and launch nothing.
_EMPTY: Final = {
    *(torch.empty, torch.empty_strided, torch.empty_like),
    *(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}
_INDEXED: Final = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_WAITS: Final = {
    aten._local_scalar_dense.default: 1,
    aten.nonzero.default: 1,
    aten.masked_select.default: 1,
    aten.equal.default: 1,
    aten.bincount.default: 2,  # its CUDA kernel asks for the least and the largest value
    aten._unique2.default: 1,
    aten.unique_dim.default: 1,
    aten.unique_consecutive.default: 1,
    aten._linalg_eigh.default: 1,  # whether it has converged
}


def _refuse_mix(func: Any, args: Any, kwargs: Kwargs) -> None:
    for tensor in pytree.tree_leaves((args, kwargs)):
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeCudaTensor):
            continue
        if tensor.dim() > 0 or func in _STRICT:
            raise DeviceMix(f"{func}: a tensor on the cpu, {(*tensor.shape,)}, and one on {CUDA}.")


def _note_index_waits(func: Any, args: Sequence[Any]) -> None:
    indices = args[1]
    for index in indices:
        if not isinstance(index, Tensor):
            continue
        if index.dtype in (torch.bool, torch.uint8):
            # A single value is written by masked_fill, which needs no list of places.
            filled = func is not aten.index.Tensor and args[2].numel() == 1 and len(indices) == 1
            if not filled:
                ACCOUNT.wait("index by a bool mask")
        elif not isinstance(index, FakeCudaTensor):
            ACCOUNT.wait("index by a CPU tensor")  # allowed: it is copied to the device


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run one of the dispatcher's operations on the values."""
    if func in _COPIES:
        return _copy(func, args, kwargs)
    if func in _INDEXED:
        _refuse_mix(func, [args[0], *args[2:]], kwargs)
        _note_index_waits(func, args)
    else:
        _refuse_mix(func, args, kwargs)
    if func in _WAITS:
        ACCOUNT.wait(str(func).removeprefix("aten."), _WAITS[func])
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        ACCOUNT.wait("repeat_interleave without output_size")
    to_host = kwargs.get("device") is not None and not _is_cuda(kwargs["device"])
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    plain_args, plain_kwargs = _plain(args), _plain(kwargs)
    if func is aten._local_scalar_dense.default:
        return plain_args[0].item()
    out = func(*plain_args, **plain_kwargs)
    if ACCOUNT.active and not func.is_view and func not in _EMPTY:
        leaves = pytree.tree_leaves((plain_args, plain_kwargs, out))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        ACCOUNT.launch(str(func), *tensors.values())
    return out if to_host else _given_back(out, args, kwargs)


def _given_back(out: Any, args: Any, kwargs: Any) -> Any:
    """Return results on the device: an argument that was written in place as the same object."""
    known = {}
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, FakeCudaTensor):
            known[id(leaf.elem)] = leaf

    def back(value: Any) -> Any:
        return known[id(value)] if id(value) in known else _wrapped(value)

    return pytree.tree_map(back, out)


def _copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        to, source = args[0], args[1]
        across = isinstance(to, FakeCudaTensor) != isinstance(source, FakeCudaTensor)
        unhurried = len(args) > 2 and args[2] and _is_pinned(source)
        if across and source.numel() and not unhurried:
            ACCOUNT.wait("copy_ between host and device")
        inner(to).copy_(inner(source))
        ACCOUNT.launch(str(func), inner(to), inner(source))
        return to
    source, device = args[0], kwargs.get("device")
    on_device = isinstance(source, FakeCudaTensor) if device is None else _is_cuda(device)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    if on_device != isinstance(source, FakeCudaTensor):
        _note_transfer(source, kwargs, on_device)
    out = func(inner(source), **kwargs)
    out = out.clone() if out is inner(source) else out
    ACCOUNT.launch(str(func), inner(source), out)
    return FakeCudaTensor(out) if on_device else out


_PINNED: Final[set[int]] = set()


def _is_pinned(source: Tensor) -> bool:
    return source.untyped_storage().data_ptr() in _PINNED


def _note_transfer(source: Tensor, kwargs: Kwargs, on_device: bool) -> None:
    """Count a wait for a copy between host and device, unless it is from pinned memory."""
    if not (kwargs.get("non_blocking") and _is_pinned(source)):
        ACCOUNT.wait("copy to the device" if on_device else "copy to the host")


# ---- functions that do not reach the dispatcher


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _plain_index(index: Any) -> Any:
    return tuple(map(inner, index)) if isinstance(index, tuple) else inner(index)


def _note_brackets(index: Any, *, reads: bool) -> None:
    """Count the waits of ``tensor[index]``."""
    for part in _parts(index):
        if isinstance(part, list) and part:  # an empty one copies nothing
            ACCOUNT.wait("index by a list")
        elif not isinstance(part, Tensor):
            continue
        elif part.dim() == 0:
            if isinstance(part, FakeCudaTensor):
                ACCOUNT.wait("index by a scalar on the device")
        elif part.dtype == torch.bool and reads:
            ACCOUNT.wait("index by a bool mask")
        elif not isinstance(part, FakeCudaTensor):
            ACCOUNT.wait("index by a CPU tensor")


def _getitem(tensor: Any, index: Any) -> Any:
    if not isinstance(tensor, FakeCudaTensor):
        raise DeviceMix("a CPU tensor indexed by one on the device")
    _note_brackets(index, reads=True)
    out = inner(tensor)[_plain_index(index)]
    if any(isinstance(part, (Tensor, list)) for part in _parts(index)):
        ACCOUNT.launch("index", out, out)
    return _wrapped(out)


def _setitem(tensor: Any, index: Any, value: Any) -> None:
    by_tensor = [part for part in _parts(index) if isinstance(part, Tensor) and part.dim()]
    if not isinstance(tensor, FakeCudaTensor):
        if any(isinstance(part, FakeCudaTensor) for part in by_tensor):
            raise DeviceMix("a CPU tensor indexed by one on the device")
        ACCOUNT.wait("copy_ between host and device")
        tensor[_plain_index(index)] = inner(value)
        return
    scalar = not isinstance(value, Tensor) or value.dim() == 0
    _note_brackets(index, reads=not scalar)
    if not scalar and not isinstance(value, FakeCudaTensor):
        if by_tensor:
            raise DeviceMix("index_put_ of a CPU value on the device")
        ACCOUNT.wait("copy_ between host and device")
    inner(tensor)[_plain_index(index)] = inner(value)
    written = inner(tensor)[_plain_index(index)]
    ACCOUNT.launch("index_put", written, written)


def _run_unguarded(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """What torch's bindings run under a device guard, which a CPU wheel has not: below autograd."""
    if func is Tensor.copy_:
        return _copy(aten.copy_.default, (*args, *kwargs.values()), {})
    _refuse_mix(func, args, kwargs)
    out = func(*_plain(args), **_plain(kwargs))
    ACCOUNT.launch(f"function {getattr(func, '__name__', func)}")
    if isinstance(out, Tensor) and args and out is inner(args[0]):
        return args[0]
    return pytree.tree_map(_wrapped, out)


def _tolist(tensor: Any) -> Any:
    ACCOUNT.wait("tolist")
    return inner(tensor).tolist()


def _scalar(kind: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def read(tensor: Any) -> Any:
        ACCOUNT.wait("item")
        return kind(inner(tensor))

    return read


def _no_numpy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy.")


def _repeat_interleave(
    tensor: Any, repeats: Any = None, dim: Any = None, *, output_size: Any = None
) -> Any:
    if not isinstance(repeats, int) and output_size is None:
        ACCOUNT.wait("repeat_interleave without output_size")
    # With one argument, that is the repeats, of places.
    given = [inner(tensor)] if repeats is None else [inner(tensor), inner(repeats), dim]
    out = torch.repeat_interleave(*given, output_size=output_size)
    ACCOUNT.launch("repeat_interleave", out, out, times=3)
    return _wrapped(out)


def _nonzero(tensor: Any, *, as_tuple: bool = False, out: Any = None) -> Any:
    ACCOUNT.wait("nonzero")
    found = inner(tensor).nonzero(as_tuple=as_tuple)
    ACCOUNT.launch("nonzero", inner(tensor), times=3)
    return tuple(map(_wrapped, found)) if as_tuple else _wrapped(found)


def _to_host(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    ACCOUNT.wait("copy to the host")
    out = inner(tensor).clone()
    ACCOUNT.launch("copy to the host", out, out)
    return out


def _to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``tensor.to(...)`` of a tensor on the device."""
    wanted = kwargs.get("device", args[0] if args else None)
    if isinstance(wanted, Tensor):
        wanted = wanted.device
    here = inner(tensor)
    dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), here.dtype)
    if isinstance(wanted, (str, torch.device)) and not _is_cuda(wanted):
        return _to_host(FakeCudaTensor(here.to(dtype)))
    if dtype == here.dtype and not kwargs.get("copy", False):
        return tensor
    # Through the dispatcher, so that gradients flow.
    return aten._to_copy.default(tensor, dtype=dtype)


class _Storage:
    """The storage of a tensor on the device."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.device = CUDA

    def data_ptr(self) -> int:
        address: int = self._storage.data_ptr()
        return address

    def nbytes(self) -> int:
        size: int = self._storage.nbytes()
        return size

    size = nbytes


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cpu: _to_host,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.tolist: _tolist,
    Tensor.numpy: _no_numpy,
    Tensor.__array__: _no_numpy,
    Tensor.data_ptr: lambda tensor: inner(tensor).data_ptr(),
    Tensor.untyped_storage: lambda tensor: _Storage(inner(tensor).untyped_storage()),
    Tensor.repeat_interleave: _repeat_interleave,
    torch.repeat_interleave: _repeat_interleave,
    Tensor.__int__: _scalar(int),
    Tensor.__float__: _scalar(float),
    Tensor.__bool__: _scalar(bool),
    Tensor.__index__: _scalar(int),
    Tensor.item: _scalar(lambda tensor: tensor.item()),
    Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    Tensor.get_device: lambda tensor: 0,
    Tensor.is_pinned: lambda tensor, device=None: False,
    Tensor.record_stream: lambda tensor, stream: None,
}

_FACTORIES: Final = {
    *(torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor),
    *(torch.as_tensor, torch.eye, torch.linspace, torch.rand, torch.randn, torch.randint),
    *(torch.empty_strided, torch.scalar_tensor, torch.randperm),
    *(torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like),
}


class _Mode(TorchFunctionMode):
    """Makes tensors on the device, and moves tensors there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func in _FACTORIES:
            return _made(func, args, kwargs)
        on_host = bool(args) and not isinstance(args[0], FakeCudaTensor)
        if func in (Tensor.to, Tensor.cuda) and on_host and isinstance(args[0], Tensor):
            default = args[1] if len(args) > 1 else None
            device = CUDA if func is Tensor.cuda else kwargs.get("device", default)
            device = device.device if isinstance(device, Tensor) else device
            if isinstance(device, (int, str, torch.device)) and _is_cuda(device):
                return _to_device(args[0], args[1:], kwargs)
        if func is Tensor.copy_ and on_host and isinstance(args[1], FakeCudaTensor):
            unhurried = kwargs.get("non_blocking") and _is_pinned(args[0])
            if not unhurried:
                ACCOUNT.wait("copy_ between host and device")
            args[0].copy_(inner(args[1]))
            return args[0]
        return func(*args, **kwargs)

    def _backward(self, loss: Any, gradient: Any = None, **_: Any) -> Any:
        """Run the backward with the mode on, which torch sets aside while this method runs."""
        with self, torch.autograd.set_multithreading_enabled(False):
            # On this thread: hooks are to find the mode.
            first = torch.ones_like(loss) if gradient is None else gradient
            engine: Any = torch.autograd.Variable._execution_engine
            return engine.run_backward((loss,), (first,), False, False, (), True, True)


def _made(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function that makes a tensor."""
    device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
    if device is None and args and isinstance(args[0], FakeCudaTensor):
        return func(*args, **kwargs)  # ..._like
    if not _is_cuda(device):
        made = func(*_plain(args), **kwargs) if device is not None else func(*args, **kwargs)
        if pinned:
            # By its storage, for views too.
            storage = made.untyped_storage()
            address = storage.data_ptr()
            _PINNED.add(address)
            weakref.finalize(made, _PINNED.discard, address)
        return made
    kwargs["device"] = torch.device("cpu")
    trained = kwargs.pop("requires_grad", False)
    made = func(*_plain(args), **kwargs)
    if func in (torch.tensor, torch.as_tensor):
        ACCOUNT.wait("torch.tensor(device=)")
    if func not in _EMPTY:
        ACCOUNT.launch(getattr(func, "__name__", "factory"), made)
    return FakeCudaTensor(made).requires_grad_(trained)


def _to_device(tensor: Tensor, args: Sequence[Any], kwargs: Kwargs) -> FakeCudaTensor:
    _note_transfer(tensor, kwargs, True)
    given = (*args, *kwargs.values())
    dtype = next((each for each in given if isinstance(each, torch.dtype)), tensor.dtype)
    there = FakeCudaTensor(tensor.detach().to(dtype, copy=True))
    ACCOUNT.launch("to", tensor, there.elem)
    return there


# ---- the rest of torch.cuda, and Triton


_ALL_STREAMS: Final[WeakSet[Stream]] = WeakSet()


class Stream:
    """A stream, or an event at the end of all its work so far. All work is done already, unless it
    sleeps."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        self._late: list[Callable[[], object]] = []
        self.sleeps = False
        _ALL_STREAMS.add(self)

    def do(self, work: Callable[[], object]) -> None:
        """Work now, or once it no longer sleeps."""
        self._late.append(work)
        if not self.sleeps:
            self.finish()

    def finish(self) -> None:
        """Do what is left, because someone waits for it."""
        self.sleeps = False
        late, self._late = self._late, []
        for work in late:
            work()

    def _nothing(self, *_: Any) -> None: ...

    record = wait = _nothing

    def record_event(self, event: object = None) -> Stream:
        return self

    def wait_event(self, event: Stream) -> None:
        event.finish()

    wait_stream = wait_event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.finish()
        ACCOUNT.wait("synchronize")


class _Streams:
    """The stream of the host's calls now; what waits do, as set_sync_debug_mode() says."""

    now = Stream()
    mode = "default"

    def on_wait(self) -> None:
        self.now.finish()
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=3)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def synchronize(self, device: object = None) -> None:
        for stream in list(_ALL_STREAMS):
            stream.finish()
        ACCOUNT.wait("synchronize")

    def set_mode(self, mode: str) -> None:
        self.mode = mode

    def sleep(self, cycles: int) -> None:
        self.now.sleeps = True


STREAMS: Final = _Streams()


def _device_properties(device: Any = None) -> Any:
    """Of an H100, as far as it is known from its data sheet."""
    return SimpleNamespace(
        name="not there",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        warp_size=32,
    )


_TORCH_CUDA: Final = {
    "device": lambda index: contextlib.nullcontext(),
    "current_device": lambda: 0,
    "current_stream": lambda device=None: STREAMS.now,
    "Stream": Stream,
    "stream": STREAMS.on,
    "_sleep": STREAMS.sleep,
    "set_sync_debug_mode": STREAMS.set_mode,
    "Event": Stream,
    "memory_allocated": lambda device=None: ACCOUNT.live,
    "max_memory_allocated": lambda device=None: ACCOUNT.peak,
    "reset_peak_memory_stats": lambda device=None: ACCOUNT.reset_peak(),
    "is_current_stream_capturing": lambda: False,
    "synchronize": STREAMS.synchronize,
    "get_device_properties": _device_properties,
    "get_device_capability": lambda device=None: (9, 0),
}


_interpreted = interpreter.GridExecutor.__call__


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a kernel of Triton's, which reads the memory behind the device."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        # An integer that is an address may be anywhere; a tensor must be on the device.
        if isinstance(value, Tensor) and not isinstance(value, FakeCudaTensor):
            raise DeviceMix(f"{executor.fn.__name__}: argument {name} is on the cpu.")
    ACCOUNT.launch(executor.fn.__name__)
    plain_args, plain_kwargs = _plain(args), _plain(kwargs)
    STREAMS.now.do(lambda: _interpreted(executor, *plain_args, **plain_kwargs))


def _counted(method: Callable[..., Any], pointers: int, mask: int | None) -> Callable[..., Any]:
    """Wrap a method of Triton's interpreter that reads or writes memory: count the bytes.
    Neighbours of a program that name the same address share one access."""

    def counted(*args: Any) -> Any:
        places = args[pointers]
        addresses = places.data.ravel()
        if mask is not None and args[mask] is not None:
            addresses = addresses[args[mask].data.ravel().astype(bool)]
        count = np.count_nonzero(np.diff(addresses)) + 1 if addresses.size else 0
        ACCOUNT.move(int(count) * places.get_element_ty().primitive_bitwidth // 8)
        return method(*args)

    return counted


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside it, the device is there."""
    builder = interpreter.InterpreterBuilder
    with contextlib.ExitStack() as stack:
        for name, value in _TORCH_CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", _launch))
        for name, mask in [
            ("create_masked_load", 2),
            ("create_masked_store", 3),
            ("create_atomic_rmw", 4),
        ]:
            pointers = 2 if name == "create_atomic_rmw" else 1
            counted = _counted(getattr(builder, name), pointers, mask)
            stack.enter_context(mock.patch.object(builder, name, counted))
        # The interpreter takes as long for a tile of any size.
        stack.enter_context(mock.patch.object(kernels, "TILE", 1 << 17))
        stack.enter_context(mock.patch.object(ACCOUNT, "on_wait", STREAMS.on_wait))
        stack.enter_context(_Mode())
        yield


class Meter:
    """What has been counted, once the counting is done."""

    spent: Spent


@contextlib.contextmanager
def counting() -> Iterator[Meter]:
    """Count what the code inside asks of the device."""
    meter = Meter()
    ACCOUNT.begin()
    try:
        yield meter
    finally:
        meter.spent = ACCOUNT.end()
