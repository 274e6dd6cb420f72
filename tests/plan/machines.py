"""Machines that tests plan for."""

from __future__ import annotations

from rayzero.plan.hardware import Hardware, Hosts

CPU_HOST = Hardware(
    hosts=Hosts(),
    device_bytes=None,
    host_bytes=1 << 40,
    shm_bytes=1 << 40,
    flops=1e12,
    link=float("inf"),
    network=float("inf"),
    memory=1e10,
)
GPU_HOSTS = Hardware(
    hosts=Hosts(count=2, gpus_each=2),
    device_bytes=80 << 30,
    host_bytes=1 << 40,
    shm_bytes=1 << 40,
    flops=1e15,
    link=5e10,
    network=1e10,
    memory=3e11,
)
