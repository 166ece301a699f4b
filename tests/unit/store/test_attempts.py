"""What receives were given is remembered by the ten thousand, for a minute."""

from __future__ import annotations

import gc
from typing import cast

import numpy as np

from millpond.store.attempts import Attempts
from millpond.store.groups import Groups
from millpond.store.handout import Drawn
from millpond.store.places import Place

RECEIVES = 1_000


def test_a_receive_of_one_run_is_nothing_to_the_collector_of_garbage() -> None:
    """What stays is looked at by each collection: 40 ms of the loop for 40,000 objects."""
    attempts = Attempts(cast(Groups, None), lambda: 0)
    drawn = Drawn(cast(Place, []), 0, 1, np.arange(3), np.ones(3, np.uint32), 0)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for number in range(RECEIVES):
            attempts.remember(1, f"a{number}", [drawn])
        more = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert more < RECEIVES // 10, f"{more} objects for {RECEIVES} receives"


def test_bytes_of_all_scattered_rows_are_counted() -> None:
    attempts = Attempts(cast(Groups, None), lambda: 0)
    scattered = Drawn(cast(Place, []), 0, 1, np.array([0, 2, 4]), np.ones(3, np.uint32), 0)
    attempts.remember(1, "a", [scattered, scattered])
    assert attempts.nbytes == 2 * scattered.offsets.nbytes
