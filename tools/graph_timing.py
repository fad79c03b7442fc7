"""The timing of w4plugin/bench, for scripts beside this file."""

from w4plugin.bench.timing import bandwidth, cold_copies, matrix_rate, microseconds

__all__ = ["bandwidth", "cold_copies", "matrix_rate", "microseconds"]
