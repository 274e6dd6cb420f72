"""What both ends of shared memory agree on: what lies where, signals, mailboxes, and what a crash leaves."""
