"""Where things lie in the memory that the threads share, as int64 words and bytes."""

from __future__ import annotations

from sglite.runtime.device.cpu_kernels.vectors import MAX_TILE, PANEL

# the state that threads share, int64 words; what different threads write is 64 bytes apart
TICKET, DONE, QUIT = 0, 8, 16
ARGS = 24  # of the job, NUM_ARGS words
NUM_ARGS = 16
STATE_WORDS = 40  # then 8 for each helper, of which the first is 1 while it sleeps

# what all layers of a step attend by: int64 words
(TOKENS, HEADS, KV_HEADS, DIM, ANGLES, POSITIONS, SLOTS, ROWS, TABLE, TABLE_WIDTH, PAGE_SIZE) = range(11)
PLAN_WORDS = 11
TILE_BYTES = 2 * MAX_TILE * PANEL * 4  # of a thread's scratch; scores follow

JOB, TOTAL, SPAN = range(3)  # the first arguments of every job; a chunk is SPAN panels, tokens or heads
PRODUCT, GATED, ATTEND, HELP, APPEND = range(5)
