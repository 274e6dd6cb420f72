"""Runs ``rayzero bench adam``, with DeepSpeedCPUAdam if it is installed: see README.md here.

python benchmarks/adam.py [options of rayzero bench adam]
"""

from rayzero.bench.adam import main

if __name__ == "__main__":
    main()
