"""Work on several threads within a budget of memory: what runs at one time costs no more than it allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

BUDGET = 640 << 20
"""Bytes that the tasks in flight may cost together; a larger task runs alone."""

Task = tuple[int, Callable[[], None]]
"""Bytes of memory while it runs, and what to run."""


def default_workers() -> int:
    """Cores this process may use, at most four: beyond that the disk is the limit."""
    return min(len(os.sched_getaffinity(0)), 4)


def run(tasks: Iterable[Task], workers: int | None = None) -> None:
    """Run all tasks, begun in order; torch uses one thread in each, since the tasks are the parallelism.

    Raises:
        What the first task (in order) that failed raised; those begun before it have ended, later ones are not begun.
    """
    workers = workers or default_workers()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    running: dict[Future[None], tuple[int, int]] = {}
    failed: dict[int, BaseException] = {}
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="w4plugin") as pool:
            try:
                for number, (cost, task) in enumerate(tasks):
                    while running and (len(running) >= workers or _cost(running) + cost > BUDGET):
                        _collect(running, failed)
                    if failed:
                        break
                    running[pool.submit(task)] = (number, cost)
                while running:
                    _collect(running, failed)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    finally:
        torch.set_num_threads(threads)
    if failed:
        raise failed[min(failed)]


def _cost(running: dict[Future[None], tuple[int, int]]) -> int:
    return sum(cost for _, cost in running.values())


def _collect(running: dict[Future[None], tuple[int, int]], failed: dict[int, BaseException]) -> None:
    """Wait for a task to end, and keep its error."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        number, _ = running.pop(future)
        if fault := future.exception():
            failed[number] = fault
