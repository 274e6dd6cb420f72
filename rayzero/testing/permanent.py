"""Imported last by the server that forks the processes of ``run_ranks``: what the server has imported is no garbage.

A process that is forked would otherwise look through all of torch at its first full collection, which copies the pages
that it shares with the server: 0.4 s and most of their memory, for each process (the advice of ``gc.freeze``'s own
documentation).
"""

import gc

gc.collect()
gc.freeze()
