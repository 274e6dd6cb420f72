"""First values of a model's parameters and buffers, also for a model too large for any one memory."""
