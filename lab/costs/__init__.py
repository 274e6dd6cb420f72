"""What one part of RayZero costs or saves."""
