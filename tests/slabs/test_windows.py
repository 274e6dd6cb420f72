"""Windows: the slabs' own pages, in one piece; private writes stay private."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import forked

from rayzero.errors import MemoryPlanError, StoreClosedError, UnsupportedError
from rayzero.memory.mapping import huge_page
from rayzero.quantities import PAGE
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab, create_slabs
from rayzero.store.rank.unit_windows import Window, WindowPiece, can_map
from tests.cuda_driver import OURS, Driver, driver

__all__ = ["driver"]

FACTS = SlabFacts(run="r", role="params", index=0, incarnation=1, layout_digest="d", kernel="k")


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[list[Slab]]:
    """Two slabs of four pages of bytes 1 to 4 and 11 to 14, behind a header page each."""
    made = create_slabs([lay_out_slab(FACTS, [("data", 4 * PAGE, 0)])] * 2, tmp_path)
    for base, slab in zip((0, 10), made, strict=True):
        for page in range(1, 5):
            slab.tensor(page * PAGE, PAGE, torch.uint8).fill_(base + page)
    yield made
    for slab in made:
        slab.close()


def piece(slab: Slab, page: int, size: int = PAGE) -> WindowPiece:
    return WindowPiece(slab=slab, offset=page * PAGE, bytes=size)


def mixed(slabs: list[Slab], *, private: bool) -> Window:
    """Pages 12, 13 of the second slab, 2 of the first, and ten bytes of 4."""
    one, two = slabs
    return Window([piece(two, 2, 2 * PAGE), piece(one, 2), piece(one, 4, 10)], private=private)


def pages(window: Window) -> list[int]:
    return window.tensor()[::PAGE].tolist()


def mapped_lines() -> int:
    return sum(".slab" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("private", [False, True])
def test_pieces_of_two_slabs_are_one_tensor(slabs: list[Slab], private: bool) -> None:
    window = mixed(slabs, private=private)
    assert window.tensor().numel() == window.bytes == 3 * PAGE + 10
    assert pages(window) == [12, 13, 2, 4]
    assert window.tensor(torch.bfloat16).numel() == (3 * PAGE + 10) // 2


def test_the_largest_piece_lies_in_memory_as_in_its_file(tmp_path: Path) -> None:
    """So that huge pages of the file are huge pages here. [Note: huge pages] in mapping.py."""
    if (huge := huge_page()) > 64 << 20:
        pytest.skip("no huge pages")
    (slab,) = create_slabs([lay_out_slab(FACTS, [("data", 2 * huge, 0)])], tmp_path)
    window = Window([piece(slab, 1, 2 * PAGE), piece(slab, 5, huge + PAGE), piece(slab, 3)], private=False)
    assert (window.tensor().data_ptr() + 2 * PAGE) % huge == 5 * PAGE
    slab.close()


@pytest.mark.parametrize("private", [False, True])
def test_a_write_of_another_process_is_seen_through_the_window_at_once(slabs: list[Slab], private: bool) -> None:
    tensor = mixed(slabs, private=private).tensor()
    before = tensor.clone()
    code = f"""
import torch
from pathlib import Path
from rayzero.slabs.slab import Slab
slab = Slab.attach(Path({str(slabs[1].path)!r}), writable=True, run="r", layout_digest="d")
slab.tensor(3 * {PAGE}, 5, torch.uint8).fill_(99)
"""
    with forked(code) as process:
        assert process.wait() == 0
    slabs[0].tensor(2 * PAGE, 1, torch.uint8).fill_(98)
    changed = (tensor != before).nonzero().flatten().tolist()
    assert changed == [*range(PAGE, PAGE + 5), 2 * PAGE]
    assert tensor[changed].tolist() == [99] * 5 + [98]


def test_private_writes_do_not_reach_the_slab_and_revert_brings_its_bytes_back(slabs: list[Slab]) -> None:
    window = mixed(slabs, private=True)
    tensor = window.tensor()
    tensor.fill_(77)
    assert slabs[1].tensor(2 * PAGE, 2 * PAGE, torch.uint8)[::PAGE].tolist() == [12, 13]
    slabs[1].tensor(2 * PAGE, PAGE, torch.uint8).fill_(50)
    assert int(tensor[0]) == 77  # the page is this process's own until then
    window.revert()
    assert tensor[::PAGE].tolist() == [50, 13, 2, 4]
    slabs[1].tensor(2 * PAGE, PAGE, torch.uint8).fill_(51)
    assert int(tensor[0]) == 51


def test_an_emptied_window_is_memory_of_its_own_where_its_tensors_are(slabs: list[Slab]) -> None:
    before, window = mapped_lines(), mixed(slabs, private=True)
    tensor = window.tensor()
    tensor.fill_(77)
    window.empty()
    assert mapped_lines() == before, "it maps no slab any more"
    assert not tensor.any()
    tensor.fill_(78)
    assert slabs[1].tensor(2 * PAGE, 2 * PAGE, torch.uint8)[::PAGE].tolist() == [12, 13]
    window.empty()
    assert not window.tensor().any()


def test_shared_writes_reach_the_slab_and_cannot_be_reverted(slabs: list[Slab]) -> None:
    window = mixed(slabs, private=False)
    window.tensor()[PAGE] = 77
    assert int(slabs[1].tensor(3 * PAGE, 1, torch.uint8)) == 77
    with pytest.raises(UnsupportedError, match="cannot be reverted"):
        window.revert()


def test_a_private_window_needs_no_right_to_write_the_slab(slabs: list[Slab]) -> None:
    assert slabs[0].path is not None
    reader = Slab.attach(slabs[0].path, writable=False, run="r", layout_digest="d")
    window = Window([piece(reader, 3)], private=True)
    window.tensor().fill_(7)
    window.revert()
    assert pages(window) == [3]
    with pytest.raises(PermissionError):
        Window([piece(reader, 3)], private=False)
    reader.close()


def test_tensors_outlive_window_and_slabs_and_the_memory_is_unmapped_after_the_last(slabs: list[Slab]) -> None:
    gc.collect()
    before = mapped_lines()
    window = mixed(slabs, private=True)
    tensor = window.tensor(torch.int16)[1:]
    assert mapped_lines() == before + 3
    window.close()
    window.close()
    for slab in slabs:
        slab.close()
    gc.collect()
    assert mapped_lines() == before - 2 + 3
    assert int(tensor[PAGE // 2]) == 13 * 257
    del tensor
    gc.collect()
    assert mapped_lines() == before - 2
    for use in (window.tensor, window.revert):
        with pytest.raises(StoreClosedError):
            use()


@pytest.mark.parametrize(
    ("pieces", "fits"),
    [
        ([(0, PAGE, 10)], True),
        ([(0, PAGE, 2 * PAGE), (2 * PAGE, 9 * PAGE, 1)], True),
        ([(0, PAGE, PAGE), (PAGE, PAGE, PAGE)], True),  # one page twice
        ([], False),
        ([(0, PAGE, 0)], False),
        ([(PAGE, PAGE, PAGE)], False),  # a gap before
        ([(0, 0, PAGE), (2 * PAGE, PAGE, PAGE)], False),  # a gap between
        ([(0, 0, 2 * PAGE), (PAGE, PAGE, PAGE)], False),  # an overlap
        ([(0, 64, PAGE)], False),
        ([(0, 0, 100), (100, PAGE, PAGE)], False),
    ],
)
def test_pieces_can_be_mapped_where_all_begin_at_pages(pieces: list[tuple[int, int, int]], fits: bool) -> None:
    assert can_map(pieces) is fits


def test_pieces_that_cannot_be_mapped_are_refused_with_their_offsets(slabs: list[Slab]) -> None:
    with pytest.raises(UnsupportedError, match=rf"\(10, {2 * PAGE}, 10\)\] cannot be mapped side by side"):
        Window([piece(slabs[0], 1, 10), piece(slabs[0], 2, 10)], private=True)
    with pytest.raises(UnsupportedError, match=rf"are not all in slab .*, which has {5 * PAGE}"):
        Window([piece(slabs[0], 4, PAGE + 1)], private=True)


def test_reverting_a_window_that_nobody_wrote_to_keeps_its_pages(slabs: list[Slab]) -> None:
    window = mixed(slabs, private=True)
    before = pages(window)  # every page is read
    mapping = window._open()
    assert not mapping.has_private(0, mapping.size)
    window.tensor().numpy()[2 * PAGE + 5] = 77  # as nobody sees it
    assert mapping.has_private(0, mapping.size)
    assert not mapping.has_private(0, 2 * PAGE)
    window.revert()
    assert not mapping.has_private(0, mapping.size)
    assert pages(window) == before


def test_a_window_is_page_locked_as_one_range_or_where_the_driver_refuses_piece_by_piece(
    slabs: list[Slab], driver: Driver
) -> None:
    lock = mixed(slabs, private=False).page_lock(OURS)
    assert list(driver.registered.values()) == [4 * PAGE]
    lock.release()
    driver.most = 2 * PAGE
    lock = mixed(slabs, private=False).page_lock(OURS)
    assert list(driver.registered.values()) == [2 * PAGE, PAGE, PAGE]
    lock.release()
    lock.release()
    driver.most = PAGE
    with pytest.raises(MemoryPlanError, match="CUDA refused to page-lock 8 KiB"):
        mixed(slabs, private=False).page_lock(OURS)
    assert driver.registered == {}
