"""What is written in C: Adam in one pass over memory, sums of ranks and of squares, block codecs (``native/``);
and the loop that measures this host's memory bandwidth as updates use it.

``hatch_build.py`` builds the library with the package; nothing is built here. If it could not be built or does not run,
``load()`` gives the reason and ``choose_kernel("auto")`` takes the torch kernel.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sysconfig
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rayzero.errors import UnsupportedError
from rayzero.kernels import native
from rayzero.kernels.kernel import AdamMemory, AdamOptions, AdamUpdate, Kernel, Segment
from rayzero.kernels.moments import BLOCK
from rayzero.kernels.rank_sum import LEAF, Range
from rayzero.kernels.stamps import STAMP, UNDO_BYTES
from rayzero.protocol.gradient_sum import Gradient, KeptTotal
from rayzero.protocol.messages import Clamp

ABI = 14  # version of the tables below: RZ_ABI in adam.c
TILE = STAMP  # elements that a thread claims at once: few, so that all threads end together; a multiple of 64
# Elements below which waking a second thread (80-100 us on a virtual machine) costs more than it gains.
_UPDATE_ALONE, _SQUARES_ALONE = 4 * TILE, 8 * LEAF

_FOLDER = Path(__file__).parent
LIBRARY = _FOLDER / f"_native.{sysconfig.get_platform()}.so"
_WHY_NOT = _FOLDER / "_native.reason"  # the build writes this if it made no library

ISAS = ("portable", "avx2", "avx512", "neon")  # by their numbers in adam.c; on each machine the slowest comes first
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 4}
_L2, _DECAY, _AMSGRAD, _FROM_GRADIENT, _CLAMP = 1, 2, 4, 8, 16
_ELEMENTS = 8 << 20  # fp32, of each of three arrays: 96 MiB together, more than caches hold
_RUNS = 5


class _Gradient(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("dtype", c_int32), ("rank", c_int32))


class _Segment(ctypes.Structure):
    _fields_ = (
        ("offset", c_int64),
        ("length", c_int64),
        ("gradients", POINTER(_Gradient)),
        ("num_gradients", c_int64),
        ("scale", c_float),
        ("weight_decay", c_float),
        ("lerp", c_float),
        ("beta2", c_float),
        ("one_minus_beta2", c_float),
        ("step_size", c_float),
        ("bias2_sqrt", c_float),
        ("eps", c_float),
        ("limit", c_float),
        ("flags", c_int32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("master", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("exp_avg_scale", c_void_p),
        ("exp_avg_sq_scale", c_void_p),
        ("moments_dtype", c_int32),
        ("max_exp_avg_sq", c_void_p),
        ("params", c_void_p),
        ("params_dtype", c_int32),
        ("stamps", c_void_p),
        ("stamp", c_int64),
        ("first_stamp", c_int64),
        ("undo", c_void_p),
        ("undo_entries", c_int64),
        ("changed", c_void_p),
        ("remainders", c_void_p),
    )


class NativeLibrary:
    """The loaded C library.

    Knows its functions and what this processor can run; not tensors or threads."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises OSError if that fails, UnsupportedError if its tables have another version."""
        self.path = path
        library = ctypes.CDLL(str(path))  # its calls release the interpreter lock
        if (abi := library.rz_abi()) != ABI:
            raise UnsupportedError(f"{path.name} has tables of version {abi}, but this rayzero has {ABI}; reinstall it")
        assert library.rz_undo_bytes() == UNDO_BYTES
        library.rz_isa.restype = library.rz_source.restype = c_char_p
        self.source: str = library.rz_source().decode()  # digest of the C source: hatch_build.py
        self.isas = tuple(isa for isa, name in enumerate(ISAS) if library.rz_isa(isa) == name.encode())  # slowest first
        self.has_fma = bool(library.rz_has_fma())  # without it, the torch kernel is faster
        self.team_create = typed(library.rz_team_create, c_void_p, c_int32)
        self.team_destroy = typed(library.rz_team_destroy, None, c_void_p)
        self.team_size = typed(library.rz_team_size, c_int32, c_void_p)
        self.adam = typed(library.rz_adam, None, c_void_p, c_int32, *[c_void_p] * 2, *[c_int64] * 4)
        self.squares = typed(
            library.rz_squares,
            None,
            *(c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64),
            *(c_float, c_float, c_void_p, c_void_p, c_void_p),
        )
        self.sum = typed(library.rz_sum, None, c_int32, c_void_p, *[c_int64] * 3, c_void_p)
        self.add = typed(library.rz_add, None, c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int32, *[c_void_p] * 3)
        self.nonfinite = typed(library.rz_nonfinite, c_int64, c_void_p, *[c_int64] * 3)
        blocks = (c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64, c_void_p)
        self.encode_blocks = typed(library.rz_encode_blocks, None, *blocks)
        self.decode_blocks = typed(library.rz_decode_blocks, None, *blocks)
        self.pack = typed(library.rz_pack, c_int64, c_int32, *[c_void_p] * 2, c_int64, *[c_void_p] * 3)
        self.unpack = typed(library.rz_unpack, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_int64)
        self.rewrite = typed(library.rz_rewrite, None, *[c_void_p] * 4, c_int64, c_float, c_int64)

    def isa(self, name: str | None = None) -> int:
        """The number of the named instruction set, or of the fastest one. Raises UnsupportedError if it does not run
        here."""
        if name is None:
            return self.isas[-1]
        if name not in ISAS or ISAS.index(name) not in self.isas:
            names = ", ".join(ISAS[isa] for isa in self.isas)
            raise UnsupportedError(f"instruction set {name!r} does not run here; these do: {names}")
        return ISAS.index(name)


def typed(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Set the types of a function of a C library, and return it."""
    function.restype, function.argtypes = result, arguments
    return cast("Callable[..., Any]", function)


@functools.cache
def load() -> NativeLibrary | str:
    """The library that was built with this package, or one sentence that says why there is none."""
    if not LIBRARY.exists():
        if _WHY_NOT.exists():
            return _WHY_NOT.read_text(encoding="utf-8").strip()
        return f"{LIBRARY.name} does not exist: rayzero runs from a folder that it was not installed from"
    try:
        return NativeLibrary(LIBRARY)
    except (OSError, AttributeError, UnsupportedError) as exc:
        return f"the library does not load: {exc}"


def why_not() -> str | None:
    """One sentence that says why the torch kernel is the better choice here; None if the native one is."""
    library = load()
    if isinstance(library, str):
        return library
    return None if library.has_fma else "this processor has no fused multiply-add: it would be slower"


class Team:
    """Threads of the library that share a call: the caller, and helpers that sleep between calls.

    Knows threads; not the work. One caller at a time. A forked process gets its own helpers."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        """``threads``: how many, the caller included. Raises MemoryError if there is no memory for them."""
        self.threads = threads
        self.address: int | None = None  # of the library's team; None: the caller works alone
        if threads == 1:
            return
        self.address = library.team_create(threads)
        if self.address is None:
            raise MemoryError(f"no memory for a team of {threads} threads")
        self._end = weakref.finalize(self, library.team_destroy, self.address)
        self._end.atexit = False  # at exit, a daemon thread may still be in a call


class _Worker:
    """What both users of the library need: the library, an instruction set and threads."""

    def __init__(self, *, threads: int | None = None, isa: str | None = None) -> None:
        """``threads``: how many compute; None: as many as torch uses in the calling thread, at each call.
        ``isa``: an instruction set by name; None: the fastest. Raises UnsupportedError if there is no library, or if
        the instruction set does not run here."""
        library = load()
        if isinstance(library, str):
            raise UnsupportedError(f"there is no native kernel: {library}")
        self._library = library
        self._isa = library.isa(isa)
        self._threads = threads
        self._team = Team(library, 1)

    @property
    def isa(self) -> str:
        """The name of the instruction set in use. All of them give the same bits."""
        return ISAS[self._isa]

    def _team_address(self) -> int | None:
        """The address of the team that shares a call; None if the caller works alone."""
        threads = self._threads or torch.get_num_threads()
        if threads != self._team.threads:
            self._team = Team(self._library, threads)
        return self._team.address


class NativeKernel(_Worker, Kernel):
    """The kernel in C. Its bits do not depend on the instruction set, the threads, or where ranges are cut. They are
    those of torch's fused kernel on a processor with FMA, so a run may move between machines with and without it."""

    name = "native"
    notes = True

    def run(self, update: AdamUpdate) -> None:
        """See ``Kernel.update``: one call into the library. With stamps and an undo log, an update during which a
        process was killed becomes whole. Raises UnsupportedError if segments overlap or a tensor is not contiguous in
        host memory."""
        memory, segments = update.memory, update.segments
        if not segments:
            return
        ordered = sorted(segments, key=lambda segment: segment.offset)
        start, stop = ordered[0].offset, ordered[-1].offset + ordered[-1].length
        table = _segment_table(ordered, update.gradients, update.scale, update.limit, coded=memory.is_coded)
        tensors = _memory_table(memory, stop, amsgrad=any(segment.options.amsgrad for segment in segments))
        team = self._team_address() if stop - start >= _UPDATE_ALONE else None
        self._library.adam(team, self._isa, byref(tensors), table, len(table), start, stop, TILE)


class NativeSquareSum(_Worker):
    """Sums of squares of rank-summed gradients, in C.

    A sum is fp64, over leaves of 65,536 elements of the range. Element i of a leaf goes to partial sum i mod 16,
    partial sums are added by halves, and leaves in order. No bit depends on the instruction set or the threads."""

    def parts(
        self,
        gradients: Sequence[Gradient],
        ranks: Sequence[int],
        ranges: Sequence[Range],
        clamp: Clamp | None = None,
        *,
        alone: bool = False,
        sums: Tensor | None = None,
    ) -> list[float]:
        """See ``SquareSum.parts``. ``clamp``: scale and clamp as ``rz_adam`` does. ``alone``: the calling thread
        computes by itself; sums of 2M elements then take half of the processor time, because no helper is woken or
        polls for the next one. One call into the library; for scattered gradients one a range."""
        if len(ranges) > 1 and _are_scattered(gradients, ranks):
            parts = [self.parts(gradients, ranks, (each,), clamp, alone=alone, sums=sums) for each in ranges]
            return [square for part in parts for square in part]
        found = _ranges_table(tuple(ranges))
        table = _gradient_table(gradients, ranks, found.start, found.stop)
        leaves, squares = (c_double * found.leaves)(), (c_double * len(ranges))()
        kept = None if sums is None else _address(sums, "sums", found.stop, torch.float32)
        team = self._team_address() if found.numel >= _SQUARES_ALONE and not alone else None
        scale, limit = (1.0, math.inf) if clamp is None else (clamp.scale, clamp.limit)
        self._library.squares(
            *(team, self._isa, table, len(table), found.bounds, len(ranges), scale, limit, kept, leaves, squares)
        )
        return list(squares)

    def nonfinite(self, gradients: Sequence[Gradient], ranks: Sequence[int], start: int, stop: int) -> int:
        """How many elements of the sum are inf or nan. Call it if a part is not finite."""
        table = _gradient_table(gradients, ranks, start, stop)
        return int(self._library.nonfinite(table, len(table), start, stop))


class NativeAdder:
    """Adds gradients of ranks, in C; the calling thread computes. Bits are those of ``RankSum``."""

    def __init__(self, isa: str | None = None) -> None:
        """``isa``: see ``_Worker``. Raises as it does."""
        worker = _Worker(threads=1, isa=isa)
        self._library, self._isa = worker._library, worker._isa

    def sum_group(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """See ``RankSum.sum_group``. Raises UnsupportedError for a tensor that is not contiguous on the host."""
        count = out.numel()
        table = _gradient_table(parts, range(len(parts)), 0, count)
        self._library.sum(self._isa, table, len(table), 0, count, _address(out, "sum", count, torch.float32))

    def add_round(
        self,
        total: Tensor,
        gradients: Sequence[Gradient],
        ranks: Sequence[int],
        ranges: Sequence[Range],
        kept: KeptTotal | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """See ``RankSum.add_round``. One call into the library; for scattered gradients one a range. Raises
        UnsupportedError as ``sum_group`` does."""
        if len(ranges) > 1 and _are_scattered(gradients, ranks):
            for each in ranges:
                self.add_round(total, gradients, ranks, (each,), kept, fresh=fresh)
            return
        found = _ranges_table(tuple(ranges))
        table = _gradient_table(gradients, ranks, found.start, found.stop)
        written = _address(total, "total", found.stop, torch.float32)
        before: tuple[int | None, int | None] = (None, None)
        if kept is not None:
            before = _address(kept.values, "kept", found.stop, torch.float32), kept.count.data_ptr()
        self._library.add(*(self._isa, table, len(table), found.bounds, len(ranges), not fresh, written, *before))


class NativeBlocks:
    """Encodes blocks of floats as small integers, in C; the calling thread computes. Bits are those of codecs/blocks.py
    on every instruction set."""

    def __init__(self, library: NativeLibrary, bits: int, isa: str | None = None) -> None:
        """``bits``: 8 or 4 for each integer."""
        self._library, self._integers, self._isa = library, {8: 0, 4: 1}[bits], library.isa(isa)

    def encode(self, values: Tensor, rows: Tensor) -> None:
        """``values``: 1D, fp32, bf16 or fp16, in host memory; ``rows``: uint8, room for all blocks."""
        self._library.encode_blocks(*self._arguments(values, rows))

    def decode(self, rows: Tensor, values: Tensor) -> None:
        """The inverse: fills ``values``."""
        self._library.decode_blocks(*self._arguments(values, rows))

    def _arguments(self, values: Tensor, rows: Tensor) -> tuple[object, ...]:
        count, dtype = values.numel(), _DTYPES[values.dtype]
        return None, self._isa, self._integers, _address(values, "values", count), dtype, count, rows.data_ptr()


# ---- Tables -----------------------------------------------------------------------------------------------------


def _segment_table(
    segments: Sequence[Segment], gradients: Sequence[Gradient], scale: float, limit: float, *, coded: bool = False
) -> ctypes.Array[_Segment]:
    end = 0
    for segment in segments:
        if segment.offset < end:
            raise UnsupportedError(f"two segments have element {segment.offset}; the native kernel takes each once")
        end = segment.offset + segment.length
    shared = {ranks for ranks in {segment.ranks for segment in segments} if not _are_scattered(gradients, ranks)}
    tables = {ranks: _gradient_table(gradients, ranks, 0, end) for ranks in shared}

    def row(segment: Segment) -> _Segment:
        start, stop = segment.offset, segment.offset + segment.length
        table = tables.get(segment.ranks) or _gradient_table(gradients, segment.ranks, start, stop)
        constants = _constants(segment.options, segment.step, scale, limit, coded=coded)
        return _Segment(start, segment.length, table, len(table), *constants)

    return (_Segment * len(segments))(*map(row, segments))  # holds the gradients' tables


@functools.lru_cache(64)  # one decision has a few, for all its shards
def _constants(options: AdamOptions, step: int, scale: float, limit: float, *, coded: bool) -> tuple[float, ...]:
    """The fields of a row from ``scale`` on. ctypes rounds each to fp32 once."""
    flags = _AMSGRAD if options.amsgrad else 0
    if limit < math.inf:
        flags |= _CLAMP
    if options.weight_decay != 0.0:
        flags |= _DECAY if options.decoupled else _L2
    lerp = c_float(1.0 - options.beta1).value
    if lerp >= 0.5:
        flags |= _FROM_GRADIENT
    correction = math.sqrt(1.0 - options.beta2**step)
    return (
        -scale if options.maximize else scale,
        1.0 - options.lr * options.weight_decay if options.decoupled else options.weight_decay,
        lerp - 1.0 if flags & _FROM_GRADIENT else lerp,
        options.beta2,
        1.0 - options.beta2,
        options.lr / (1.0 - options.beta1**step),
        1.0 / correction if coded else correction,
        options.eps,
        limit,
        flags,
    )


class _Ranges(NamedTuple):
    bounds: ctypes.Array[c_int64]  # start, stop, start, stop, ...
    start: int  # the first
    stop: int  # the last
    numel: int
    leaves: int


@functools.lru_cache(4096)  # the same step after step, and models have thousands of parameters
def _ranges_table(ranges: tuple[Range, ...]) -> _Ranges:
    sizes = [stop - start for start, stop in ranges]
    return _Ranges(
        (c_int64 * (2 * len(ranges)))(*chain.from_iterable(ranges)),
        min((start for start, _ in ranges), default=0),
        max((stop for _, stop in ranges), default=0),
        sum(sizes),
        sum(-(-size // LEAF) for size in sizes),
    )


def _gradient_table(
    gradients: Sequence[Gradient], ranks: Sequence[int], start: int, stop: int
) -> ctypes.Array[_Gradient]:
    """``start``, ``stop``: the elements that are read."""
    rows = [
        _Gradient(_origin(gradients[rank], rank, start, stop), _DTYPES[gradients[rank].dtype], rank) for rank in ranks
    ]
    return (_Gradient * len(rows))(*rows)


def _origin(gradient: Gradient, rank: int, start: int, stop: int) -> int:
    """The address that the shard's first element has, or would have if the elements from ``start`` on followed it."""
    if isinstance(gradient, Tensor):
        return _address(gradient, f"gradient of rank {rank}", stop)
    part = gradient[start:stop]
    return _address(part, f"gradient of rank {rank}", stop - start) - start * part.itemsize


def _are_scattered(gradients: Sequence[Gradient], ranks: Sequence[int]) -> bool:
    return any(not isinstance(gradients[rank], Tensor) for rank in ranks)


def _memory_table(memory: AdamMemory, end: int, *, amsgrad: bool) -> _Memory:
    kinds, params, stamps, changed = ("exp_avg", "exp_avg_sq"), memory.params, memory.stamps, memory.changed
    largest, coded = memory.states.get("max_exp_avg_sq"), memory.is_coded
    if amsgrad and largest is None:
        raise UnsupportedError("amsgrad needs max_exp_avg_sq, and the shard was allocated without it")
    if amsgrad and coded:
        raise UnsupportedError("amsgrad needs moments in fp32")
    (mean, *scale), (square, *root_scale) = (memory.states[kind].tensors for kind in kinds)
    dtype = mean.dtype if coded else torch.float32
    scales = [_address(each, "scales", end // BLOCK, torch.float32) for each in (*scale, *root_scale)]
    split = memory.master.dtype is torch.int16
    if split and (params is None or params.dtype is not torch.bfloat16 or coded):
        raise UnsupportedError("a split master needs parameters in bf16 and moments in fp32")
    return _Memory(
        None if split else _address(memory.master, "master", end, torch.float32),
        _address(mean, "exp_avg", end, dtype),
        _address(square, "exp_avg_sq", end, dtype),
        *(scales or (None, None)),
        _MOMENTS[dtype],
        None if largest is None else _address(largest.tensors[0], "max_exp_avg_sq", end, torch.float32),
        None if params is None else _address(params, "params", end),
        0 if params is None else _DTYPES[params.dtype],
        *((None, 0, 0) if stamps is None else (stamps.words.data_ptr(), stamps.whole, stamps.first)),
        *((None, 0) if stamps is None or stamps.undo is None else (stamps.undo.data_ptr(), len(stamps.undo))),
        None if changed is None else changed.data_ptr(),
        _address(memory.master, "remainders", end, torch.int16) if split else None,
    )


def _address(tensor: Tensor, name: str, end: int, dtype: torch.dtype | None = None) -> int:
    """The address of the elements. Raises UnsupportedError for a tensor that C would misread."""
    found = tensor.dtype
    if found is not dtype and (dtype is not None or found not in _DTYPES):
        raise UnsupportedError(f"{name} is {found}, but the native kernel takes {dtype or [*_DTYPES]}")
    if tensor.stride() != (1,) or tensor.numel() < end or not tensor.is_cpu:
        raise UnsupportedError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}, but the native "
            f"kernel takes contiguous 1D tensors in host memory, here of at least {end:,} elements"
        )
    return tensor.data_ptr()


def measure_bandwidth(threads: int) -> float | None:
    """The bytes per second that ``threads`` threads read and write; the best of a few runs, about 0.1 s in all.

    None without the native library, which has the loop. Frees its memory."""
    library = native.load()
    if isinstance(library, str):
        return None
    arrays, team = [_array() for _ in range(3)], Team(library, threads)

    def seconds() -> float:
        began = time.perf_counter()
        library.rewrite(team.address, *(array.data_ptr() for array in arrays), _ELEMENTS, 1.0, native.TILE)
        return time.perf_counter() - began

    size = 2 * sum(array.nbytes for array in arrays)
    return size / min(seconds() for _ in range(_RUNS))


def _array() -> Tensor:
    """A 1D fp32 array with all pages touched, huge ones as owners' are, where there are some. It has its own mapping,
    because malloc may keep freed memory."""
    memory = mmap.mmap(-1, 4 * _ELEMENTS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
