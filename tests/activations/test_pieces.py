"""Which bytes travel: the view vectors."""

from __future__ import annotations

import torch

from rayzero.activations.entry import StoragePiece, View, plan_pieces, view_of


def pieces(*tensors: torch.Tensor) -> list[StoragePiece]:
    return plan_pieces(tensors[0].untyped_storage().nbytes(), [view_of(t) for t in tensors])


def test_a_view_of_83_percent_takes_the_whole_storage():
    base = torch.empty(64, 96)
    assert pieces(base[:, :80]) == [StoragePiece(0, 6144 * 4)]


def test_a_view_of_8_percent_is_gathered():
    base = torch.empty(64, 96)
    assert pieces(base[:, :8]) == [StoragePiece(0, 63 * 96 * 4 + 32, view_of(base[:, :8]))]
    assert pieces(base[:, :8])[0].nbytes == 64 * 8 * 4


def test_two_strided_halves_are_one_storage_stored_once():
    base = torch.empty(64, 512)
    assert pieces(base[:, :256], base[:, 256:]) == [StoragePiece(0, 64 * 512 * 4)]


def test_full_and_row_slice_in_either_order_are_stored_once():
    base = torch.empty(256, 96)
    assert pieces(base, base[:128]) == pieces(base[:128], base) == [StoragePiece(0, 256 * 96 * 4)]


def test_row_halves_make_the_whole_and_a_row_half_alone_only_itself():
    base = torch.empty(256, 128)
    assert pieces(base[:128], base[128:]) == [StoragePiece(0, 256 * 128 * 4)]
    assert pieces(base[128:], base[128:]) == [StoragePiece(128 * 128 * 4, 256 * 128 * 4)]


def test_a_transposed_tensor_is_dense():
    assert pieces(torch.empty(64, 96).t()) == [StoragePiece(0, 64 * 96 * 4)]


def test_pieces_begin_aligned_and_a_gathered_view_is_shared():
    base = torch.empty(1000, 100)
    assert pieces(base[3:5])[0].start == 1024
    assert len(pieces(base[:, :3], base[:, :3], base[:, 1:4])) == 2


def test_an_expanded_view_is_not_dense():
    assert not view_of(torch.empty(1, 8).expand(4, 8)).dense
    assert pieces(torch.empty(1, 8).expand(4, 8)) == [StoragePiece(0, 32)]
    assert View(0, (4, 2), (2, 1), 4).dense
