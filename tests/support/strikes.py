"""What a fault does where a signal before or after a call is not enough: inside native code, in the middle of a write,
between a call and its answer."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
from typing import Any, NoReturn

from rayzero.owner.shard import OwnedShard
from rayzero.protocol.messages import Record
from rayzero.slabs.slab import Slab
from rayzero.store.host.channel import BrokenLinkError
from rayzero.store.shm import words
from rayzero.store.shm.signals import load_acquire_64, store_release_64
from rayzero.store.wire import translate

_PROT_READ = 1
_LOST = "the call was lost, as a fault of this test"


# ---- inside the native update


def middle_page(_: Any, owned: OwnedShard, *__: Any) -> int | None:
    """The address of a page in the middle of a shard's masters that holds nothing else; None if they are too few."""
    assert owned.master is not None
    begin, size = owned.master.data_ptr(), owned.master.nbytes
    page = -(-(begin + size // 2) // mmap.PAGESIZE) * mmap.PAGESIZE
    return page if page + mmap.PAGESIZE <= begin + size else None


def die_in_the_update(*args: Any) -> None:
    """Make the update that follows end this process when it comes to the middle of a shard: what it writes there may
    only be read from now on. A tile is torn then, as by a SIGKILL in the middle of it, at the same element each
    time."""
    page = middle_page(*args)
    assert page is not None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _PROT_READ):
        raise OSError(ctypes.get_errno(), "mprotect of a shard's masters failed")


# ---- in the middle of a record


def die_in_the_record(control: Slab, record: Record) -> NoReturn:
    """Leave the half of a record that ``rz_cell_write`` leaves when its process dies: an odd sequence and some of the
    bytes."""
    cells = words.cells_in(control, "record")
    cell = cells[record.decision.step % len(cells)]
    message = translate.record_to_pb(record).SerializeToString()
    store_release_64(cell._address, load_acquire_64(cell._address) | 1)
    store_release_64(cell._address + 8, len(message))
    ctypes.memmove(cell._address + 16, message, len(message) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")


# ---- between a call and its answer


def method_of_call(_: Any, method: str, request: Any, *__: Any) -> str | None:
    """The gRPC method of a call with one request; None for a stream, which cannot be sent twice."""
    return method if hasattr(request, "SerializeToString") else None


def method_of_ask(ask: Any, *_: Any) -> str:
    """The gRPC method that an answer belongs to."""
    return str(ask._method)


def lose_call(*_: Any) -> NoReturn:
    """A call never arrives."""
    raise BrokenLinkError(_LOST)


def lose_answer(ask: Any, channel: Any, _: Any) -> None:
    """A call arrives, but its answer does not."""
    ask._again(channel, BrokenLinkError(_LOST))
