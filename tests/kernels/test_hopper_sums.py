"""How warps of several programs agree on who sums a tile: the kernels' own code, run as Python in any interleaving.

On the device what goes wrong here is a tile that nobody stores, or one summed before it is written.
"""

from __future__ import annotations

import random
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

LIMIT = 2000


class Turns:
    """Threads of which one runs at a time, until its next operation on memory; which one goes on is drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ready = threading.Condition()
        self.waiting: set[int] = set()
        self.running = 0
        self.turn: int | None = None
        self.failures: list[BaseException] = []

    def step(self, i: int) -> None:
        with self.ready:
            self.running -= 1
            self.waiting.add(i)
            self.ready.notify_all()
            self.ready.wait_for(lambda: self.turn == i)
            self.turn = None
            self.waiting.discard(i)

    def run(self, bodies: list[Any]) -> None:
        def guarded(body: Any) -> None:
            try:
                body()
            except BaseException as failure:
                self.failures.append(failure)
            with self.ready:
                self.running -= 1
                self.ready.notify_all()

        self.running = len(bodies)
        threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for _ in range(LIMIT):
            with self.ready:
                self.ready.wait_for(lambda: self.running == 0)
                if not self.waiting:
                    break
                self.turn = self.draw.choice(sorted(self.waiting))
                self.running += 1
                self.ready.notify_all()
        else:
            raise AssertionError("a warp waits for ever")
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def summed(shares: list[float], pairs: bool, seed: int, launches: int = 2) -> None:
    """Every program's warp with its sums: one of them ends with the whole, launch after launch."""
    from w4plugin.kernels import hopper_sums as sums

    word = {"count": 0}
    operations = {name: getattr(sums, name).value for name in ("_COUNT", "_PUBLISH", "_AWAIT", "_RESET")}
    name_of = {asm: name for name, asm in operations.items()}
    assert len(name_of) == len(operations)

    for launch in range(launches):
        memory: dict[int, float] = {}
        turns = Turns(1000 * seed + launch)

        def warp(i: int, memory: dict[int, float], turns: Turns) -> tuple[float, bool]:
            def at(asm: Any, counter: Any, value: Any) -> int:
                name, value = name_of[asm.value], getattr(value, "value", value)
                turns.step(i)
                before = word["count"]
                if name in ("_COUNT", "_PUBLISH"):
                    word["count"] += value
                elif name == "_RESET":
                    word["count"] = value
                else:
                    while word["count"] < value:
                        turns.step(i)
                return before

            def store(place: int, value: float, cache_modifier: str) -> None:
                turns.step(i)
                memory[place] = value

            def load(place: int, cache_modifier: str) -> float:
                turns.step(i)
                return memory[place]

            language = SimpleNamespace(
                store=store,
                load=load,
                zeros_like=lambda x: 0.0,
                where=lambda condition, yes, no: yes if condition else no,
            )
            outside = {
                "gl": language, "_at": at, "_slot": lambda program, *_: program, "_WRITTEN": sums._WRITTEN.value,
                "PAIRS_FROM": sums.PAIRS_FROM.value,
                **{name: getattr(sums, name) for name in operations},
            }  # fmt: skip

            def plain(function: Any) -> Any:
                return FunctionType(function.fn.__code__, {**function.fn.__globals__, **outside})

            if pairs:
                came = plain(sums.come)(0, 0, 1, sums.PAIRS_FROM.value, 1)
                return plain(sums._sum_of_two)(shares[i], i, 1 - i, "counter", came)
            return plain(sums._sum_of_all)(shares[i], 0, i, "counter", 0, 0, len(shares) - 1, 1, 1, 1, 1)

        found: dict[int, tuple[float, bool]] = {}

        def body(i: int, found: Any = found, memory: Any = memory, turns: Any = turns, warp: Any = warp) -> Any:
            return lambda: found.__setitem__(i, warp(i, memory, turns))

        turns.run([body(i) for i in range(len(shares))])
        wholes = [total for total, whole in found.values() if whole]
        ordered = 0.0
        for share in shares:
            ordered += share
        assert wholes == [ordered], "one warp holds the sum, in the programs' order"
        assert word["count"] == 0, "the next launch finds the counter as this one did"


@pytest.mark.cpu_only
@pytest.mark.parametrize("seed", range(60))
def test_two_that_share_a_tile(seed: int) -> None:
    summed([0.1, 0.2], True, seed)


@pytest.mark.cpu_only
@pytest.mark.parametrize("programs", [2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_any_number_that_share_a_tile(programs: int, seed: int) -> None:
    summed([0.1, 0.7, 1e17, -1e17, 0.3][:programs], False, seed)
