"""Simulates a training step, event by event, with the real layout, shard map, schedule and lead."""
