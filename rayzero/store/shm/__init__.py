"""What both ends of shared memory agree on: the layout of slabs, signals, mailboxes, and what a crash leaves."""
