"""peerbench, where the device rests before each timing of many rows: ``peer_rest.py PEERBENCH MILLISECONDS ARGUMENTS``.

After a few hundred milliseconds of large products an H200 is at its power limit and clocks a quarter lower than before.
What a kernel does on the host between its points, compile or tune, lets the device rest, so without this some kernels
are timed rested and others not.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

ROWS = 128
"""Rows of x from which products are large enough to reach the power limit."""


def main() -> None:
    path, rest = Path(sys.argv[1]).resolve(), float(sys.argv[2]) / 1e3
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    timed = module.graph_time

    def graph_time(run: Any, states: Any, x: Any, a: Any) -> Any:
        if x.shape[0] >= ROWS:
            run(states[0], x)  # what is compiled or chosen at a first call does not count as rest
            time.sleep(rest)
        return timed(run, states, x, a)

    module.graph_time = graph_time  # type: ignore[attr-defined]
    sys.argv = [str(path), *sys.argv[3:]]
    module.main()


if __name__ == "__main__":
    main()
