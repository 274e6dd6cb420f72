"""Slabs: shared, refused when they are another's, and gone when their maker is, however it ended."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import Forked, forked

from rayzero.config.run import MAX_NAME_BYTES
from rayzero.errors import (
    ConfigError,
    HandshakeError,
    MemoryPlanError,
    StoreClosedError,
    StoreError,
    UnsupportedError,
)
from rayzero.memory.mapping import huge_page
from rayzero.quantities import PAGE
from rayzero.slabs.header import (
    SlabFacts,
    SlabHeader,
    decode_header,
    encode_header,
    header_bytes,
    lay_out_slab,
)
from rayzero.slabs.slab import Slab, create_slabs
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs, sweep

MIB = 1 << 20
FACTS = SlabFacts(run="run/1", role="grads", index=3, incarnation=7, layout_digest="ab" * 16, kernel="native avx512")
OURS = {"run": FACTS.run, "layout_digest": FACTS.layout_digest}


def header(size: int = MIB, *, number: int = 0, kind: str = "data") -> SlabHeader:
    return lay_out_slab(replace(FACTS, number=number), [(kind, size, 64)])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    made = Slab.create(header(), tmp_path)
    yield made
    made.close()


# ---- pages ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="tests pages of shared memory")
def test_punched_pages_are_free_and_come_back_as_zeros():
    made = Slab.create(header(), SHARED_MEMORY)
    try:
        whole, start = _pages(made), header_bytes(num_regions=1)
        values = made.tensor(start, MIB, torch.uint8).fill_(7)
        made.punch(start + 100, MIB - 200)
        kept = range(0, 100), range(MIB - 100, MIB)
        assert whole - MIB < _pages(made) <= whole - MIB + 4 * PAGE, "whole pages only"
        assert all(bool((values[part.start : part.stop] == 7).all()) for part in kept)
        made.allocate(start, MIB)
        assert _pages(made) == whole
        assert not values[2 * PAGE : MIB - 2 * PAGE].any()
        made.punch(start + 1, PAGE)
        assert _pages(made) == whole, "no whole page"
    finally:
        made.close()


def _has_huge_pages() -> bool:
    """Whether the kernel makes huge pages of shared memory for a program that asks; without RayZero's code."""
    huge = huge_page()
    if huge > 64 * MIB:  # other processors, or no such pages
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    libc.mmap.restype = ctypes.c_void_p
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    reserved = mmap.mmap(-1, 2 * huge)
    at = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    at += -at % huge
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.write(bytes(huge))
        file.flush()
        fixed = 0x10
        assert libc.mmap(at, huge, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file.fileno(), 0) == at
        return libc.madvise(at, huge, 25) == 0


def _in_huge_pages(path: Path | None) -> int:
    """Bytes of a file that this process maps as huge pages."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("ShmemPmdMapped"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(
    not SHARED_MEMORY.is_dir() or not _has_huge_pages(), reason="the kernel makes no huge pages of shared memory"
)
def test_shared_memory_has_huge_pages_in_every_process_and_gives_any_page_back() -> None:
    size, huge = 4 * huge_page(), huge_page()
    start = header_bytes(num_regions=1)
    made = Slab.create(header(size), SHARED_MEMORY)
    try:
        values, whole = made.tensor(start, size, torch.uint8).fill_(7), _pages(made)
        assert _in_huge_pages(made.path) == 4 * huge, "all but the last page"
        assert made.path is not None
        attached = Slab.attach(made.path, writable=False, **OURS)
        assert bool((attached.tensor(start, size, torch.uint8) == 7).all())
        assert _in_huge_pages(made.path) == 8 * huge, "mapped twice"
        attached.close()
        made.punch(huge + PAGE, PAGE)
        assert _pages(made) == whole - PAGE, "one small page of a huge one"
        gone = slice(huge + PAGE - start, huge + 2 * PAGE - start)
        assert not values[gone].any()
        values[gone] = 7
        made.allocate(huge, huge)
        assert bool((values == 7).all()), "what is there stays"
    finally:
        made.close()


def test_pages_that_do_not_come_back_are_said_so(slab, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryPlanError, match=r"shared memory needs 1 MiB, but .* has .* free"):
        slab.allocate(0, MIB)


def _pages(slab: Slab) -> int:
    return os.fstat(slab.fileno()).st_blocks * 512


# ---- header -----------------------------------------------------------------------------------------------------


def test_a_header_comes_back_whole() -> None:
    longest = replace(FACTS, run="π" * (MAX_NAME_BYTES // 2))
    whole = lay_out_slab(longest, [("lines", 100, 64), ("empty", 0, 0), ("data", PAGE + 1, 0)])
    assert [region.offset for region in whole.regions] == [PAGE, 2 * PAGE, 2 * PAGE]
    assert whole.bytes == 4 * PAGE
    assert decode_header("slab", encode_header(whole), whole.bytes) == whole
    assert [region.bytes for region in whole.regions_of("data")] == [PAGE + 1]
    assert whole.regions_of("of the future") == ()


def test_a_table_of_many_regions_takes_more_header_pages() -> None:
    many = lay_out_slab(FACTS, [("line", 64, 0)] * 300)
    assert many.header_bytes == header_bytes(300) > PAGE
    assert len(encode_header(many)) <= many.header_bytes == many.regions[0].offset
    assert decode_header("slab", encode_header(many), many.bytes) == many


def test_a_name_that_does_not_fit_the_header_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"role '.*' takes 17 bytes; .* room for 16"):
        encode_header(lay_out_slab(replace(FACTS, role="optimizer-states-"), []))
    with pytest.raises(UnsupportedError, match="kind"):
        encode_header(lay_out_slab(FACTS, [("x" * 17, 1, 0)]))


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (0, "slab is not a slab: it begins with"),
        (8, "has slab format 252, this rayzero reads 3"),
        (20, "damaged header"),
        (60, "damaged header"),
        (340, "damaged header"),
    ],
)
def test_a_header_with_one_wrong_byte_is_refused(at: int, said: str) -> None:
    data = bytearray(encode_header(header()))
    data[at] ^= 0xFF
    with pytest.raises(HandshakeError, match=said):
        decode_header("slab", bytes(data), 1 << 40)


def test_a_slab_that_was_cut_off_is_refused() -> None:
    whole = header()
    with pytest.raises(HandshakeError, match="cut off"):
        decode_header("slab", encode_header(whole), whole.bytes - 1)
    with pytest.raises(HandshakeError, match="within its header"):
        decode_header("slab", encode_header(whole)[:40], whole.bytes)
    with pytest.raises(HandshakeError, match="is not a slab"):
        decode_header("slab", b"", 0)


# ---- one slab ---------------------------------------------------------------------------------------------------


def test_a_fresh_slab_is_zero_private_to_its_user_and_named_after_run_and_role(slab: Slab, tmp_path: Path) -> None:
    assert int(slab.tensor(PAGE, MIB, torch.uint8).count_nonzero()) == 0
    assert slab.path is not None
    assert slab.path.stat().st_mode & 0o777 == 0o600
    assert slab.path.stat().st_size == PAGE + MIB
    assert slab.path.stat().st_blocks * 512 >= PAGE + MIB  # allocated, not sparse
    assert slab.path.name.startswith("rayzero-run_1-grads-3.0-")
    assert names(tmp_path) == [slab.path.name]


def test_attaching_to_what_belongs_to_others_names_both_sides(slab: Slab, tmp_path: Path) -> None:
    assert slab.path is not None
    with pytest.raises(HandshakeError, match=r"run 'run/1', this is run 'run/2'"):
        Slab.attach(slab.path, writable=False, run="run/2", layout_digest=FACTS.layout_digest)
    with pytest.raises(HandshakeError, match=r"layout abababababab, this process has cdcd"):
        Slab.attach(slab.path, writable=False, run="run/1", layout_digest="cd" * 16)
    with pytest.raises(HandshakeError, match="is not there"):
        Slab.attach(tmp_path / "rayzero-none.slab", writable=False, **OURS)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(HandshakeError, match="is not a slab"):
        Slab.attach(tmp_path / "text", writable=False, **OURS)


def test_who_attached_only_to_read_sees_writes_and_removes_nothing(slab: Slab) -> None:
    assert slab.path is not None
    reader = Slab.attach(slab.path, writable=False, **OURS)
    seen = reader.tensor(PAGE, 8, torch.int64)
    slab.tensor(PAGE, 8, torch.int64).fill_(5)
    assert seen.tolist() == [5] * 8
    reader.close()
    assert slab.path.exists()


def test_tensors_outlive_their_slab_and_its_file(tmp_path: Path) -> None:
    slab = Slab.create(header(), tmp_path)
    tensor, keeper, address = slab.tensor(PAGE, 8, torch.int64), slab.keeper, slab.address(0)
    slab.close()
    slab.close()
    assert names(tmp_path) == []
    tensor.fill_(9)
    view = tensor[4:]
    del tensor, slab
    gc.collect()
    assert view.tolist() == [9] * 4
    assert is_mapped(address)
    del view
    assert is_mapped(address)  # by what keeps an address
    del keeper
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_a_closed_slab_is_refused_by_name(tmp_path: Path) -> None:
    slab = Slab.create(header(), tmp_path)
    slab.close()
    for use in (lambda: slab.tensor(0, 1, torch.uint8), lambda: slab.address(0), slab.fileno, lambda: slab.keeper):
        with pytest.raises(StoreClosedError, match=r"grads-3\.0.*after close"):
            use()


def test_a_tensor_beyond_the_end_is_refused(slab: Slab) -> None:
    assert slab.tensor(PAGE, 0, torch.float32).numel() == 0
    with pytest.raises(ValueError, match="buffer length"):
        slab.tensor(PAGE, MIB + 1, torch.uint8)


def test_a_slab_without_a_name_leaves_no_file(tmp_path: Path) -> None:
    slab = Slab.create(header(), None)
    assert slab.path is None
    slab.tensor(PAGE, 4, torch.float32).fill_(1)
    assert os.fstat(slab.fileno()).st_size == slab.header.bytes
    slab.close()


# ---- making several ---------------------------------------------------------------------------------------------


def test_progress_counts_every_byte_once_and_ends_at_all(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    headers = [header(70 * MIB if number == 1 else MIB, number=number) for number in range(3)]
    slabs = create_slabs(headers, tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(slab.header.bytes for slab in slabs)
    assert [slab.header.facts.number for slab in slabs] == [0, 1, 2]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 4
    assert seen[-1] == (total, total)
    for slab in slabs:
        slab.close()
    assert create_slabs([], tmp_path) == []


def test_more_than_the_file_system_has_is_said_in_one_line_and_leaves_nothing() -> None:
    huge = lay_out_slab(replace(FACTS, run=f"full{os.getpid()}"), [("data", 100 << 40, 0)])
    with pytest.raises(MemoryPlanError, match=r"needs 100 TiB, but /dev/shm has .* free .*--shm-size") as caught:
        create_slabs([huge])
    assert "\n" not in str(caught.value)
    assert list(SHARED_MEMORY.glob(f"rayzero-full{os.getpid()}-*")) == []


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_room_that_runs_out_while_slabs_are_made_leaves_nothing(tmp_path: Path) -> None:
    headers = [header(MIB, number=0), header(3 * MIB, number=1), header(MIB, number=2)]
    with file_size_limit(2 * MIB), pytest.raises(MemoryPlanError, match="slab_dir") as caught:
        create_slabs(headers, tmp_path)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert names(tmp_path) == []


def test_an_error_of_the_progress_callback_leaves_nothing(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("nobody listens")

    with pytest.raises(RuntimeError, match="nobody listens"):
        create_slabs([header(number=number) for number in range(3)], tmp_path, on_progress=fail)
    assert names(tmp_path) == []


def test_a_directory_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slab_dir is '.*nowhere'"):
        Slab.create(header(), tmp_path / "nowhere")


# ---- sweeping ---------------------------------------------------------------------------------------------------

MAKER = f"""
import sys
from pathlib import Path
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import create_slabs
facts = {FACTS!r}
slabs = create_slabs([lay_out_slab(facts, [("data", 1 << 20, 0)])] * 2, Path(sys.argv[1]))
tensor = slabs[0].tensor(4096, 8, __import__("torch").uint8)
print("made", flush=True)
"""


@contextmanager
def maker(directory: Path, then: str, run: str = FACTS.run) -> Iterator[Forked]:
    with forked(MAKER.replace(repr(FACTS), repr(replace(FACTS, run=run))) + then, directory) as process:
        assert process.said() == "made"
        yield process


def test_slabs_of_a_killed_process_are_swept_and_those_of_a_living_one_are_not(tmp_path: Path, slab: Slab) -> None:
    with maker(tmp_path, "import time; time.sleep(100)", run="another") as process:
        assert sweep(tmp_path) == []
        found = list_slabs(tmp_path)
        assert [(one.alive, one.header and one.header.facts.role) for one in found] == [(True, "grads")] * 3
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [one.path for one in list_slabs(tmp_path) if one.alive] == [slab.path]
    assert [one.header.pid for one in list_slabs(tmp_path) if not one.alive and one.header] == [process.pid] * 2
    removed = sweep(tmp_path)
    assert [size for _, size in removed] == [slab.header.bytes] * 2
    assert slab.path is not None
    assert names(tmp_path) == [slab.path.name]
    assert sweep(tmp_path) == []


def test_slabs_of_a_killed_process_wait_for_its_successor_while_its_run_lives(tmp_path: Path, slab: Slab) -> None:
    with maker(tmp_path, "tensor[3] = 7; print('set', flush=True); import time; time.sleep(100)") as process:
        assert process.said() == "set"
        (theirs, other) = [one.path for one in list_slabs(tmp_path) if one.path != slab.path]
        with pytest.raises(StoreError, match="cannot be taken over: the process that made it still runs"):
            Slab.adopt(theirs)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sweep(tmp_path) == []
    adopted = [Slab.adopt(theirs), Slab.adopt(other)]
    assert {slab.header.pid for slab in list_slabs(theirs.parent) if slab.header is not None} == {os.getpid()}
    assert sorted(int(one.tensor(4096, 8, torch.uint8)[3]) for one in adopted) == [0, 7]
    slab.close()
    assert sweep(tmp_path) == []
    assert [one.alive for one in list_slabs(tmp_path)] == [True, True]
    for one in adopted:
        one.close()
    assert names(tmp_path) == []
    with pytest.raises(HandshakeError, match="was swept before a successor took it over"):
        Slab.adopt(theirs)


@pytest.mark.parametrize("end", ["", "raise RuntimeError('stop')"])
def test_a_process_that_ends_by_itself_removes_its_slabs(tmp_path: Path, end: str) -> None:
    with maker(tmp_path, "sys.stderr = None\n" + end) as process:
        process.wait(60)
    assert names(tmp_path) == []


def test_a_forked_child_that_ends_leaves_its_parents_slabs_alone(tmp_path: Path) -> None:
    forks = """
import fcntl
import os
if (child := os.fork()) == 0:
    for slab in slabs:
        slab.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
from rayzero.slabs.sweep import sweep
print(sweep(Path(sys.argv[1])), len(list(Path(sys.argv[1]).iterdir())))
"""
    with maker(tmp_path, forks) as process:
        assert process.said() == "[] 2"


def test_a_slab_that_another_process_is_listing_is_swept(tmp_path: Path) -> None:
    slab = Slab.create(header(), tmp_path)
    assert slab.path is not None
    slab.close(unlink=False)
    with slab.path.open("rb") as listing:
        fcntl.flock(listing, fcntl.LOCK_SH)
        assert sweep(tmp_path) == [(slab.path, slab.header.bytes)]
    assert names(tmp_path) == []


def test_of_two_sweeps_at_once_one_removes_a_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one runs while the first holds the slab's lock, before it removes the file."""
    slab = Slab.create(header(), tmp_path)
    slab.close(unlink=False)
    unlink, second = Path.unlink, []

    def unlink_after_another(path: Path, missing_ok: bool = False) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        second.extend(sweep(tmp_path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_after_another)
    assert sweep(tmp_path) == []
    assert second == [(slab.path, slab.header.bytes)]


def test_a_file_swept_before_its_maker_locked_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maker stops between creating and locking, where a sweep takes its file."""
    swept: list[tuple[Path, int]] = []
    create = os.open

    def create_and_pause(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = create(path, flags, mode)
        if flags & os.O_CREAT and not swept:
            swept.extend(sweep(tmp_path))
        return fd

    monkeypatch.setattr(os, "open", create_and_pause)
    slab = Slab.create(header(), tmp_path)
    assert len(swept) == 1
    assert slab.path is not None
    assert names(tmp_path) == [slab.path.name]
    assert sweep(tmp_path) == []
    slab.close()


def test_a_slab_that_was_never_filled_is_swept_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "rayzero-r-grads-0.0-abcd.slab.making").write_bytes(b"")
    (tmp_path / "rayzero-r-grads-0.0-abcd.txt").write_bytes(b"")
    (tmp_path / "other.slab").write_bytes(b"")
    (tmp_path / "rayzero-link.slab").symlink_to(tmp_path / "other.slab")
    assert [(one.alive, one.header) for one in list_slabs(tmp_path)] == [(False, None)]
    assert [path.name for path, _ in sweep(tmp_path)] == ["rayzero-r-grads-0.0-abcd.slab.making"]
    assert len(names(tmp_path)) == 3


def test_who_only_looks_at_a_dead_process_s_slab_does_not_keep_it_from_its_successor(tmp_path: Path) -> None:
    with maker(tmp_path, "import time; time.sleep(100)") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (path, _) = [one.path for one in list_slabs(tmp_path)]
    looker = os.open(path, os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    looks_away = threading.Timer(0.2, os.close, [looker])
    looks_away.start()
    Slab.adopt(path).close()
    looks_away.join()
    sweep(tmp_path)


def test_a_dead_process_s_slab_that_cannot_be_read_waits_while_a_living_one_has_such_slabs(tmp_path: Path) -> None:
    """They may be of one run of another rayzero, whose successor is about to take the slab over."""
    for name in ("dead", "alive"):
        (tmp_path / f"rayzero-r-{name}-0.0-abcd.slab").write_bytes(b"another format")
    alive = os.open(tmp_path / "rayzero-r-alive-0.0-abcd.slab", os.O_RDWR)
    fcntl.flock(alive, fcntl.LOCK_EX)
    assert sweep(tmp_path) == []
    os.close(alive)
    assert len(sweep(tmp_path)) == 2
