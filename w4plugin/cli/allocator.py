"""glibc's allocator, set for a process that converts one layer after another.

By default large blocks are mappings of their own, given back to the system when they are freed: the next layer then
pays for its pages again, a quarter of a second a gigabyte. Kept, the pages of one layer serve the next.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEEP = 256 << 20


def keep_freed_pages() -> None:
    """Change the allocator of this process; without glibc nothing happens."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((M_MMAP_THRESHOLD, KEEP), (M_TRIM_THRESHOLD, KEEP), (M_ARENA_MAX, 1)):
            libc.mallopt(option, value)
