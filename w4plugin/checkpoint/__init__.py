"""Checkpoints on disk or on the hub: index, reading, writing, repack, verify."""
