"""Who is there, who is late, and what could be resumed from."""

from __future__ import annotations

from dashboards.spec import ANY_IS_BAD, Page, Row, grown, panel

PAGE = Page(
    uid="rayzero-reliability",
    title="RayZero / Reliability",
    description="Processes, heartbeats, recoveries, checkpoints and links.",
    variables=(),
    rows=(
        Row(
            title="Processes",
            panels=(
                panel(
                    "Processes",
                    "Wanted, ready, and late (not heard of lately), by kind.",
                    "none",
                    ("sum by (run, kind, state) (rayzero_actors{<run>})", "{{run}} {{kind}} {{state}}"),
                ),
                panel(
                    "Since last heard of",
                    "Processes tell every 2 s. One climbs: it hangs, its node is overloaded, or it is gone.",
                    "s",
                    ("max by (run, process) (rayzero_heartbeat_age_seconds{<run>})", "{{run}} {{process}}"),
                ),
                panel(
                    "Scraped",
                    "1: Prometheus reads the process's exporter. 0: gone, or its port is not reachable.",
                    "none",
                    ("max by (run, role, rank, actor) (up{<run>})", "{{run}} {{role}} {{rank}}{{actor}}"),
                ),
            ),
        ),
        Row(
            title="Recoveries",
            panels=(
                panel(
                    "Deaths outlived",
                    "Processes that died and were replaced, in the last hour. Many: look at their nodes and logs.",
                    "none",
                    (f"sum by (run, what) {grown('rayzero_recoveries_total{<run>}')}", "{{run}} {{what}}"),
                    thresholds=ANY_IS_BAD,
                ),
                panel(
                    "Seconds a death",
                    "What the loops waited: detect, until the death is acted on (on the driver's node); start, until "
                    "the new process answers; re-form, until everybody knows it; restart, of the whole run.",
                    "s",
                    (
                        f"sum by (run, phase) {grown('rayzero_recovery_seconds_total{<run>}')} / ignoring (phase) "
                        f"group_left () (sum by (run) {grown('rayzero_recoveries_total{<run>}')} > 0)",
                        "{{phase}} {{run}}",
                    ),
                ),
            ),
        ),
        Row(
            title="Refused",
            panels=(
                panel(
                    "Refused clients",
                    "At owners and exporters, in the last hour, by reason. A wrong token, role, password or handshake "
                    "is a scanner, a scrape config without the password, or a process of another run: see the log.",
                    "none",
                    (
                        f"sum by (run, door, reason) {grown('rayzero_refused_total{<run>}')}",
                        "{{run}} {{door}}: {{reason}}",
                    ),
                    thresholds=ANY_IS_BAD,
                ),
            ),
        ),
        Row(
            title="Loggers",
            panels=(
                panel(
                    "Rows to loggers",
                    "Of metrics.jsonl, in the last hour, with run.report_to. lost: the logger refused them while it "
                    "took others, and rayzero status says why. None, while steps are done: it is slow or down, and "
                    "gets them later.",
                    "none",
                    (
                        f"sum by (run, logger, result) {grown('rayzero_logger_rows_total{<run>}')}",
                        "{{run}} {{logger}} {{result}}",
                    ),
                ),
            ),
        ),
        Row(
            title="Checkpoints",
            panels=(
                panel(
                    "Age of the newest",
                    "What would be lost now. See run.checkpoint_every.",
                    "s",
                    ("time() - max by (run) (rayzero_checkpoint_last_success_timestamp_seconds{<run>})", "{{run}}"),
                ),
                panel(
                    "Seconds",
                    "write: an actor's file; publish: manifest and rename. Mean of the run so far.",
                    "s",
                    (
                        "sum by (run, phase) (rayzero_checkpoint_seconds_sum{<run>}) / "
                        "sum by (run, phase) (rayzero_checkpoint_seconds_count{<run>})",
                        "{{phase}} {{run}}",
                    ),
                ),
                panel(
                    "Size",
                    "Of the owners' files in the last checkpoint, together.",
                    "bytes",
                    ("sum by (run) (rayzero_checkpoint_bytes{<run>})", "{{run}}"),
                ),
                panel(
                    "Failures",
                    "Files that could not be written. Not 0: see the run's log; is the disk full?",
                    "none",
                    (f"sum by (run) {grown('rayzero_checkpoint_failures_total{<run>}')}", "{{run}}"),
                    thresholds=ANY_IS_BAD,
                ),
            ),
        ),
    ),
)
