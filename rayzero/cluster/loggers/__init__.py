"""Rows of a run's metrics.jsonl on their way to TensorBoard, W&B, MLflow and CSV: a process of the driver for each."""
