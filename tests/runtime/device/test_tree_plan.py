from __future__ import annotations

import numpy as np
import pytest

from sglite.runtime.device.cuda.tree_plan import (
    MEASURED,
    Costs,
    Cut,
    Group,
    TreePlan,
    TreeShape,
    cut_groups,
    make_plan,
    plan_tree,
)

SHAPE = TreeShape(kv_heads=8, queries=4, kv_bytes=4096, processors=132)
FREE = Costs(launches=-1e9)


def groups(*sizes: tuple[int, int]) -> list[Group]:
    """(rows, tokens of the prefix) of each group; the rows of all are dealt out in turn."""
    order = np.random.default_rng(0).permutation(sum(rows for rows, _ in sizes)).astype(np.int32)
    ends = np.cumsum([rows for rows, _ in sizes])
    return [Group(n, np.sort(order[end - rows : end])) for (rows, n), end in zip(sizes, ends, strict=True)]


def covered(plan: TreePlan, row: int) -> list[tuple[int, int]]:
    """The parts of its prefix that a row's items read, after checking that it is a member of each."""
    _, first, count, place = plan.shares[row].tolist()
    parts = []
    for first_member, members, _, begin, end, *_ in plan.items[first : first + count].tolist():
        assert place < members
        assert plan.members[first_member + place] == row
        parts.append((begin, end))
    return parts


@pytest.mark.parametrize("sizes", [[(64, 8192)], [(5, 300), (70, 1000), (2, 4097)], [(2, 256)] * 40, [(200, 16384)]])
@pytest.mark.parametrize("queries", [1, 3, 4, 8])
def test_every_row_finds_its_whole_prefix_in_its_items(sizes: list[tuple[int, int]], queries: int) -> None:
    every = groups(*sizes)
    alone = 3
    rows = np.arange(sum(n for n, _ in sizes) + alone, dtype=np.int32)[::-1].copy()
    shape = TreeShape(kv_heads=2, queries=queries, kv_bytes=1024, processors=132)
    plan = plan_tree(every, rows, shape, costs=FREE)
    assert plan is not None
    assert len(plan.items) <= plan.key.items
    for group in every:
        for row in group.members.tolist():
            parts = covered(plan, row)
            assert plan.shares[row, 0] == group.length
            assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])] and parts[-1][
                1
            ] == group.length
    assert (plan.items[:, 1] * queries <= plan.key.block_m).all()
    assert all(int(rows[plan.members[first]]) == row for first, _, row, *_ in plan.items.tolist())
    assert not plan.shares[-alone:].any()


def test_one_long_prefix_is_cut_so_that_every_multiprocessor_works() -> None:
    cut = cut_groups(groups((64, 8192)), SHAPE)
    assert cut == Cut(block_m=128, per_tile=32, chunk=1024, items=16)
    assert cut_groups(groups((16, 8192)), SHAPE) == Cut(block_m=64, per_tile=16, chunk=512, items=16)


def test_the_key_stays_when_rows_finish() -> None:
    rows = np.arange(64, dtype=np.int32)
    keys = {make_plan(g, rows, cut).key for n in range(40, 65) if (cut := cut_groups(g := groups((n, 8192)), SHAPE))}
    assert len(keys) == 1


def test_reading_once_is_chosen_where_it_saves_more_than_it_costs() -> None:
    def chosen(*sizes: tuple[int, int]) -> bool:
        rows = np.arange(sum(n for n, _ in sizes), dtype=np.int32)
        return plan_tree(groups(*sizes), rows, SHAPE, costs=MEASURED) is not None

    assert chosen((64, 8192)) and chosen((256, 4096)) and chosen((16, 8192)) and chosen((16, 512)) and chosen((4, 2048))
    assert not chosen((4, 512)) and not chosen((2, 1024)) and not chosen((1, 16384))
    assert not chosen(*[(2, 1024)] * 32), "what 64 rows read at the same time comes fast"


def test_a_group_that_is_not_worth_it_does_not_keep_others_from_theirs() -> None:
    plan = plan_tree(groups((60, 8192), (2, 256)), np.arange(64, dtype=np.int32), SHAPE)
    assert plan is not None and sorted({*plan.prefixes.tolist()})[-1] == 8192


def test_more_items_than_fit_are_not_planned() -> None:
    assert cut_groups(groups(*[(2, 256)] * 600), SHAPE) is None
