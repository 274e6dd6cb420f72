"""Which groups leave the device, when they come back, and what that costs."""
