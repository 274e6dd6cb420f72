"""What ranks, owners and the lead say to each other: messages, the store of a rank, an owner as the lead sees it."""
