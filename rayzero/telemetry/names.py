"""The name, unit and labels of every measurement that is taken; nothing is named here before something feeds it.

Rules: prefix ``rayzero_``, base units in the name, ``_total`` for counters, few label values.
"""

from __future__ import annotations

TRANSFER_BYTES = "rayzero_transfer_bytes_total"
"""Counter, bytes of payload (headers excluded). Labels: direction = fetch, push, load; transport = inproc, grpc."""

FETCH_SECONDS = "rayzero_fetch_seconds"
"""Timing of one unit's fetch from request to filled. Labels: transport."""

PUSH_SECONDS = "rayzero_push_seconds"
"""Timing of one unit's push from call to landed. Labels: transport."""

TRANSFER_RETRIES = "rayzero_transfer_retries_total"
"""Counter, bulk streams sent again whole after a failed link or damaged bytes. Labels: direction; transport."""

PREFETCH_REQUESTS = "rayzero_prefetch_requests_total"
"""Counter of uses of a unit. Labels: result = hit (was there), late (on its way), miss (not asked for yet)."""

PREFETCH_DEPTH = "rayzero_prefetch_depth_units"
"""Gauge, units asked for ahead of the one in use, kept as a counter of its changes."""

PREFETCH_LATE_SECONDS = "rayzero_prefetch_late_seconds"
"""Timing of waits for a unit that was on its way."""

EXPOSED_WAIT_SECONDS = "rayzero_exposed_wait_seconds_total"
"""Counter, seconds a rank's training loop stood still. Labels: cause = fetch, push, optimizer, norm."""

OPTIMIZER_UPDATE_SECONDS = "rayzero_optimizer_update_seconds"
"""Timing of one step's update in one owner. Labels: actor."""

OPTIMIZER_PARAMS = "rayzero_optimizer_params_total"
"""Counter, parameter elements updated. Labels: actor."""

CHECKPOINT_STALL_SECONDS = "rayzero_checkpoint_stall_seconds_total"
"""Counter, seconds an owner's updates waited while it wrote its checkpoint file. Labels: actor."""

PINNED_UNITS = "rayzero_pinned_units_total"
"""Counter of units that could not be resharded at step() because views or saved tensors held them. Labels: unit."""
