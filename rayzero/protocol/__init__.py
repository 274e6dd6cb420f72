"""What ranks, owners and the lead say to each other: messages, the store as a rank sees it, which owner has what."""
