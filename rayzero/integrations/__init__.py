"""Other people's training loops on RayZero: Hugging Face Accelerate and transformers' Trainer."""
