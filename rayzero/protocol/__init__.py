"""What ranks, owners and the lead say to each other: messages, a rank's store, and an owner as the lead sees it."""
