from __future__ import annotations

import random

import numpy as np

from sglite.runtime.cache.page_allocator import PageAllocator


def test_no_page_is_handed_out_twice_and_all_come_back() -> None:
    rng = random.Random(0)
    allocator = PageAllocator(100)
    out: list[np.ndarray] = []
    for _ in range(500):
        if out and rng.random() < 0.5:
            allocator.free(out.pop(rng.randrange(len(out))))
        else:
            out.append(allocator.allocate(rng.randint(0, allocator.num_free)))
        every = np.concatenate([allocator.free_pages(), *out])
        assert sorted(every.tolist()) == list(range(100))
    for pages in out:
        allocator.free(pages)
    assert allocator.num_free == 100
