"""Formats: pure functions from a checkpoint's tensors to W4Tensor and back."""
