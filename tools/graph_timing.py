"""The timing of w4plugin/bench, for scripts beside this file."""

from w4plugin.bench.timing import bandwidth, matrix_rate, microseconds

__all__ = ["bandwidth", "matrix_rate", "microseconds"]
