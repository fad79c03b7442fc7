"""What memory and matrix units allow: time, speed-up and critical M of a product with 16-bit or 4-bit weights.

    time(M) = max(bytes(M) / bandwidth, 2 M K N / rate)
    intensity(M) = 2 M K N / bytes(M)            ridge = rate / bandwidth, both in operations a byte

A product leaves the memory-bound side where its intensity meets the ridge. With the weight alone in mind (activations
are few then), intensity is 2 M / b for b bytes a weight, so the critical M is ridge * b / 2: on an A100 (312 Tflop/s,
2 TB/s: ridge 156) 156 for b = 2 and 39 for b = 0.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Device:
    """bandwidth in bytes a second, rate in operations a second."""

    bandwidth: float
    rate: float

    @property
    def ridge(self) -> float:
        """Operations a byte at which both limits meet."""
        return self.rate / self.bandwidth


def weight_bytes(k: int, n: int, four_bit: bool, group: int, asym: bool) -> float:
    """Bytes of a weight: 16-bit values, or packed words with a 16-bit scale (and half a byte of zero point) a group."""
    if not four_bit:
        return 2.0 * k * n
    groups = math.ceil(k / group)
    return k * n / 2 + groups * n * (2.5 if asym else 2.0)


def total_bytes(m: int, k: int, n: int, four_bit: bool, group: int, asym: bool) -> float:
    """The least a product moves: weight, activations and output once each."""
    return weight_bytes(k, n, four_bit, group, asym) + 2.0 * m * (k + n)


def intensity(m: int, k: int, n: int, four_bit: bool, group: int, asym: bool) -> float:
    """Operations a byte."""
    return 2.0 * m * k * n / total_bytes(m, k, n, four_bit, group, asym)


def seconds(d: Device, m: int, k: int, n: int, four_bit: bool, group: int = 128, asym: bool = False) -> float:
    """The roofline's time."""
    return max(total_bytes(m, k, n, four_bit, group, asym) / d.bandwidth, 2.0 * m * k * n / d.rate)


def speedup(d: Device, m: int, k: int, n: int, group: int = 128, asym: bool = False) -> float:
    """16-bit time over 4-bit time, as predicted."""
    return seconds(d, m, k, n, False) / seconds(d, m, k, n, True, group, asym)


def critical_m(d: Device, bytes_per_weight: float) -> float:
    """M from which a product is bound by the matrix units."""
    return d.ridge * bytes_per_weight / 2


def crossing(points: list[tuple[int, float]], level: float = 1.0) -> float | None:
    """M at which a measured speed-up first falls to ``level``, interpolated in log M; None if it does not.

    ``points`` are (M, speed-up) in rising M.
    """
    for (m0, s0), (m1, s1) in pairwise(points):
        if s0 > level >= s1:
            return math.exp(math.log(m0) + (s0 - level) / (s0 - s1) * (math.log(m1) - math.log(m0)))
    return None
