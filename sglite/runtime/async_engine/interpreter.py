"""What a step loop asks of the interpreter that it shares with other threads.

A step takes the interpreter lock back a dozen times. Beside a thread that computes in Python (one that reads a large
constraint) each time may take a switch interval, of 5 ms unless another is set.

The collector goes over everything at once now and then, with the lock held: 15 to 46 ms. What was there before the loop
is left out, as it stays; what comes later and stays (positions of grammars) would bring that about every few seconds.
So whole collections wait for a moment in which nobody asks for anything, or for a hundred times as long.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_S = 0.00005
_NEW_PER_YOUNG = 3  # collections of the newest objects to one of the middle generation, which takes 0.2 ms each
_YOUNG_PER_WHOLE = 3000
_DUE = 30  # the same, at rest


@contextmanager
def beside_a_loop() -> Iterator[None]:
    """While a step loop runs in this process. Whoever sets other values meanwhile keeps them."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    within = thresholds[0], min(thresholds[1], _NEW_PER_YOUNG), max(thresholds[2], _YOUNG_PER_WHOLE)
    sys.setswitchinterval(min(interval, _SWITCH_S))
    gc.set_threshold(*within)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if gc.get_threshold() == within:
            gc.set_threshold(*thresholds)
        if sys.getswitchinterval() <= _SWITCH_S:
            sys.setswitchinterval(interval)


def collect_at_rest() -> None:
    """Nobody asks for anything: what was put off, if that is much."""
    if gc.get_count()[2] >= _DUE:
        gc.collect()
