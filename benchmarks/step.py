"""Runs ``rayzero bench step`` with two peers: FSDP2 with CPU offload, and DeepSpeed ZeRO-3 if it is installed.

python benchmarks/step.py [options of rayzero bench step]
"""

from peers import peers

from rayzero.bench.step import main

if __name__ == "__main__":
    main(peers=peers)
