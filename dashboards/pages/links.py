"""Prefetch: was a unit there when it was used; and the links that its bytes take."""

from __future__ import annotations

from dashboards.spec import LOW_IS_BAD, Page, Row, panel

PAGE = Page(
    uid="rayzero-links",
    title="RayZero / Prefetch and links",
    description="Hits and misses of the prefetch, its window, and bytes and latencies of fetches and pushes.",
    variables=("rank",),
    rows=(
        Row(
            title="Prefetch",
            panels=(
                panel(
                    "Uses of units that were not up",
                    "hit: the bytes were there; late: on their way; miss: not asked for. Misses go on: the order of "
                    "use changes between steps, or the budget holds too little.",
                    "ops",
                    ("sum by (result) (rate(rayzero_prefetch_requests_total{<rank>}[<i>]))", "{{result}}"),
                    kind="stack",
                ),
                panel(
                    "Hit ratio",
                    "Low and late high: raise gpu_param_memory_budget or prefetch_buffer_size, or the link is slow.",
                    "percentunit",
                    (
                        'sum by (run, rank) (rate(rayzero_prefetch_requests_total{<rank>,result="hit"}[<i>])) / '
                        "(sum by (run, rank) (rate(rayzero_prefetch_requests_total{<rank>}[<i>])) > 0)",
                        "{{run}} rank {{rank}}",
                    ),
                    thresholds=LOW_IS_BAD,
                    at_most=1,
                ),
                panel(
                    "Early and late",
                    "How long before its use a unit was there (p50), and waits for those that were late (p95).",
                    "s",
                    (
                        "histogram_quantile(0.5, sum by (le) "
                        "(rate(rayzero_prefetch_lead_seconds_bucket{<rank>}[<i>])))",
                        "early, p50",
                    ),
                    (
                        "histogram_quantile(0.95, sum by (le) "
                        "(rate(rayzero_prefetch_late_seconds_bucket{<rank>}[<i>])))",
                        "late, p95",
                    ),
                ),
                panel(
                    "Where units are late",
                    "Seconds waited a second, by layer group: a tall one is a unit too large for those beside it.",
                    "s",
                    (
                        "topk(8, sum by (group) (rate(rayzero_prefetch_group_late_seconds_total{<rank>}[<i>])))",
                        "{{group}}",
                    ),
                ),
                panel(
                    "Window",
                    "Bytes of gathered parameters, of those on their way, and the most there may be.",
                    "bytes",
                    ("sum by (run, rank) (rayzero_prefetch_window_bytes{<rank>})", "gathered, {{run}} rank {{rank}}"),
                    (
                        "sum by (run, rank) (rayzero_prefetch_inflight_bytes{<rank>})",
                        "on the way, {{run}} rank {{rank}}",
                    ),
                    ("max by (run) (rayzero_prefetch_window_limit_bytes{<rank>})", "limit {{run}}"),
                ),
                panel(
                    "Prefetched and not used",
                    "wasted: dropped after their bytes had come; cancelled: on their way. They go on: the order of use "
                    "changes, or the budget is too small for the depth.",
                    "ops",
                    ("sum by (result) (rate(rayzero_prefetch_dropped_total{<rank>}[<i>]))", "{{result}}"),
                    kind="stack",
                ),
                panel(
                    "Depth",
                    "Units asked for ahead of the one in use; it adapts to measured seconds.",
                    "none",
                    ("max by (run, rank) (rayzero_prefetch_depth_units{<rank>})", "{{run}} rank {{rank}}"),
                ),
            ),
        ),
        Row(
            title="Links",
            panels=(
                panel(
                    "Bytes a second",
                    "Payload as it travels. CPU ranks of the owners' host compute in the owners' memory: no fetch.",
                    "Bps",
                    (
                        "sum by (direction, transport) (rate(rayzero_transfer_bytes_total{<run>}[<i>]))",
                        "{{direction}} {{transport}}",
                    ),
                ),
                panel(
                    "Fetch, p50 and p95",
                    "One unit from request to filled, the wait for its version included.",
                    "s",
                    (
                        "histogram_quantile(0.5, sum by (le, transport) "
                        "(rate(rayzero_fetch_seconds_bucket{<rank>}[<i>])))",
                        "p50 {{transport}}",
                    ),
                    (
                        "histogram_quantile(0.95, sum by (le, transport) "
                        "(rate(rayzero_fetch_seconds_bucket{<rank>}[<i>])))",
                        "p95 {{transport}}",
                    ),
                ),
                panel(
                    "Push, p50 and p95",
                    "One unit from call to landed.",
                    "s",
                    (
                        "histogram_quantile(0.5, sum by (le, transport) "
                        "(rate(rayzero_push_seconds_bucket{<rank>}[<i>])))",
                        "p50 {{transport}}",
                    ),
                    (
                        "histogram_quantile(0.95, sum by (le, transport) "
                        "(rate(rayzero_push_seconds_bucket{<rank>}[<i>])))",
                        "p95 {{transport}}",
                    ),
                ),
                panel(
                    "Compression",
                    "Bytes before over bytes after wire_compression: 1 without it, 2 for fp32 gradients as bf16.",
                    "none",
                    (
                        "sum by (run, direction) (rate(rayzero_transfer_raw_bytes_total{<rank>}[<i>])) / "
                        "(sum by (run, direction) (rate(rayzero_transfer_bytes_total{<rank>}[<i>])) > 0)",
                        "{{direction}} {{run}}",
                    ),
                ),
                panel(
                    "Retries",
                    "Bulk streams sent again whole. Not 0: the network loses or damages data.",
                    "ops",
                    (
                        "sum by (direction, transport) (rate(rayzero_transfer_retries_total{<run>}[<i>]))",
                        "{{direction}} {{transport}}",
                    ),
                ),
                panel(
                    "Links that came back",
                    "Links that broke and were opened again; calls were repeated, nothing was lost. Both ends count.",
                    "ops",
                    (
                        "sum by (role, peer) (rate(rayzero_link_reconnects_total{<run>}[<i>]))",
                        "{{role}} to {{peer}}",
                    ),
                ),
                panel(
                    "Links down",
                    "Seconds a second that links were down, of those that came back.",
                    "none",
                    (
                        "sum by (role, peer) (rate(rayzero_link_down_seconds_total{<run>}[<i>]))",
                        "{{role}} to {{peer}}",
                    ),
                ),
                panel(
                    "gRPC calls",
                    "Answered by owners. Within a step between processes of one host there are none.",
                    "reqps",
                    ("sum by (method, code) (rate(rayzero_grpc_requests_total{<run>}[<i>]))", "{{method}} {{code}}"),
                ),
                panel(
                    "gRPC p95",
                    "From a call's arrival to its end; calls that wait for other ranks include the wait.",
                    "s",
                    (
                        "histogram_quantile(0.95, sum by (le, method) "
                        "(rate(rayzero_grpc_request_seconds_bucket{<run>}[<i>])))",
                        "{{method}}",
                    ),
                ),
            ),
        ),
        Row(
            title="Followers on other hosts",
            panels=(
                panel(
                    "Followers",
                    "Processes that follow the weights over gRPC. Nobody counts those that read an owner's memory.",
                    "none",
                    ("max by (run) (rayzero_followers{<run>})", "{{run}}"),
                ),
                panel(
                    "Versions behind",
                    "The follower that is farthest behind: 0 or 1 if it takes every version.",
                    "none",
                    ("max by (run) (rayzero_follower_lag_versions{<run>})", "{{run}}"),
                ),
                panel(
                    "Bytes to followers",
                    "Payload, of all followers together.",
                    "Bps",
                    ("sum by (run, form) (rate(rayzero_follow_bytes_total{<run>}[<i>]))", "{{form}} {{run}}"),
                ),
                panel(
                    "From publication to follower, p50 and p95",
                    "One shard, until its last byte has left its owner.",
                    "s",
                    (
                        "histogram_quantile(0.5, sum by (le, run) (rate(rayzero_follow_seconds_bucket{<run>}[<i>])))",
                        "p50 {{run}}",
                    ),
                    (
                        "histogram_quantile(0.95, sum by (le, run) (rate(rayzero_follow_seconds_bucket{<run>}[<i>])))",
                        "p95 {{run}}",
                    ),
                ),
            ),
        ),
    ),
)
