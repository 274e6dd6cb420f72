"""Runs the thread of a process that waits on its bell."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rayzero.store.shm.signals import Bell

_LISTEN_S = 1.0  # how often it looks even if nothing rings


class Listener:
    """Looks at once, and again whenever the bell rings, in a thread that it starts.

    Knows the bell; not what there is to see. A ring during a look makes it look again."""

    def __init__(self, bell: Bell, look: Callable[[], None], name: str, every_s: float = _LISTEN_S) -> None:
        """``look`` must not wait, and handles its own errors. ``every_s``: how often it looks if nothing rings."""
        self._bell, self._look, self._every_s = bell, look, every_s
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closing:
            heard = self._bell.value  # before looking
            self._look()
            self._bell.wait(heard, self._every_s)

    def close(self) -> None:
        """End the thread and join it. If the thread itself calls this, it ends after the current look. Idempotent."""
        self._closing = True
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()
