"""What the project promises, and what could break each promise. `test_promises.py` finds a test of the first tier for
each cell of this table, by its mark: `promise("exact", "hosts")`."""

from __future__ import annotations

PROMISES = {
    "exact": "the bits of plain PyTorch",
    "hidden": "copies and updates wait for nobody who computes",
    "bounded": "memory and bytes are those of the plan",
    "recoverable": "a death costs no committed step",
    "scalable": "owners come and go while a run goes on",
    "refused": "what cannot be done is refused by name before anything changes",
    "safe": "strangers and hostile files get nothing",
    "observable": "what happens is shown and counted as it is",
    "installs": "it runs from a clean clone and from a wheel",
}

MECHANISMS = {
    "transports": "in process, shared memory, gRPC",
    "precisions": "fp32, bf16, fp16, masters of frozen parameters",
    "optimizers": "kernels, other classes, states partly on devices",
    "moments": "Adam's moments in codes",
    "codecs": "frozen parameters and gradients in fewer bytes",
    "accumulation": "several backwards a step",
    "activations": "activation offload",
    "hybrid": "HybridDeviceOptimizer",
    "checkpoints": "our own, other systems', remote ones",
    "integrations": "transformers, Accelerate, Lightning, Ray Train",
    "cli": "the command line",
    "jobs": "processes on a Ray cluster",
    "hosts": "several hosts",
    "tls": "certificates and tokens",
    "alerts": "dashboards, alerts, exporters' protection",
}

CANNOT_BREAK = {
    "exact": {
        "cli": "it starts runs and computes nothing",
        "jobs": "Ray starts processes; what they compute is tested without it",
        "alerts": "they read metrics",
    },
    "hidden": {
        "moments": "they are encoded in the pass of the update that is hidden",
        "codecs": "frozen units are decoded by the copy that is hidden",
        "accumulation": "the same pushes, more of them",
        "integrations": "they make the calls of a plain loop",
        "cli": "it takes no part in a step",
        "jobs": "Ray takes no part in a step",
        "tls": "the same transfers, encrypted",
        "alerts": "they read metrics",
    },
    "bounded": {
        "integrations": "they hold no tensors of their own",
        "cli": "it holds no tensors",
        "jobs": "the same processes; the whole ledger is measured in the second tier",
        "alerts": "they read metrics",
    },
    "recoverable": {
        "activations": "they live within a step, which a dead rank repeats",
        "alerts": "they read metrics",
    },
    "scalable": {
        "activations": "they never meet an owner",
        "hybrid": "it has no owners",
        "integrations": "owners change beneath the loop, which is not asked",
        "alerts": "they read metrics",
    },
    "safe": {
        "precisions": "no stranger chooses them",
        "optimizers": "no stranger chooses them",
        "moments": "no stranger chooses them",
        "codecs": "records come from files and owners, whose damage is refused",
        "accumulation": "no stranger chooses it",
        "activations": "they stay in the process",
        "hybrid": "it stays in the process",
    },
    "observable": {
        "moments": "their bytes are counted, see bounded",
        "codecs": "their bytes are counted, see bounded",
        "accumulation": "steps are counted as without it",
    },
    "installs": {
        "transports": "they need nothing that is installed apart",
        "precisions": "they need nothing that is installed apart",
        "moments": "they are part of the kernels",
        "codecs": "they need nothing that is installed apart",
        "accumulation": "it needs nothing that is installed apart",
        "activations": "they need nothing that is installed apart",
        "hybrid": "it uses the kernels",
        "checkpoints": "they need nothing that is installed apart",
        "integrations": "their packages are the user's",
        "tls": "it needs nothing that is installed apart",
    },
}
"""Promise -> mechanism -> why the mechanism cannot break it; every other cell has a test."""
