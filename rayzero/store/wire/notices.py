"""What an owner says of versions it has published."""

from __future__ import annotations

Notice = tuple[int, int, int]  # shard, its version, the version that its content is from
News = list[Notice]
