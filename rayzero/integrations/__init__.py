"""Other people's training loops on RayZero: Accelerate, transformers' Trainer, Lightning, Ray Train."""
