"""Runs the training loops of Accelerate, transformers, Lightning and Ray Train on RayZero."""
