"""Encrypts tensors' bytes chunk by chunk, with keys that two processes have agreed on over TLS.

Python's TLS takes 1.1 CPU seconds a GB of both ends together, most of them for its records of 16 KiB; one pass over a
whole chunk takes 0.2 (lab/RESULTS.md, "store"). A key is one connection's in one direction, and the two that
use it have it from a call over mutual TLS. Chunks are counted, and the count is the nonce: one that is changed, left
out, repeated or of another connection is refused. (AES-256-GCM: NIST SP 800-38D.)
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["KEY_BYTES", "TAG_BYTES", "ChunkCipher"]

KEY_BYTES = 32
TAG_BYTES = 16  # that an encrypted chunk is longer


class ChunkCipher:
    """One direction of one connection, at one end. Used by one thread at a time."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def encrypt(self, head: bytes, payload: memoryview, out: memoryview) -> None:
        """Write the next chunk's payload into ``out``, encrypted, with a tag at its end that also covers ``head``."""
        self._cipher.encrypt_into(self._nonce(), payload, head, out)

    def decrypt(self, head: bytes, sealed: memoryview, out: memoryview) -> bool:
        """Write the payload of the next chunk into ``out``. False: it is not what the other end has sent."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, head, out)
        except InvalidTag:
            return False
        return True

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")
