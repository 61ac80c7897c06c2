"""The list of parts that Triton's decode programs take, against what each row sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.attention.triton.worklist import WorkList, work_list

NUM_ROWS, MAX_PARTS, SPAN = 6, 16, 32
compiled = jax.jit(work_list, static_argnums=(1, 2, 3))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=NUM_ROWS, max_size=NUM_ROWS),
    st.sampled_from([None, 1, 100]),
)
def test_decode_work_covers_what_each_row_sees_once(lengths: list[int], window: int | None) -> None:
    work = compiled(jnp.asarray(lengths, jnp.int32), window, MAX_PARTS, SPAN)
    items = np.asarray(work.items)
    assert len(items) == NUM_ROWS + MAX_PARTS
    visible = [length if window is None else min(length, window) for length in lengths]
    share = -(-sum(-(-count // SPAN) for count in visible) // MAX_PARTS)
    merges = []
    for row, length in enumerate(lengths):
        begin = length - visible[row]
        own = np.flatnonzero((items[:, 0] == row) & (items[:, 1] < items[:, 2]))
        if len(own) > 1:
            merges.append([row, own[0], len(own)])
        for item in own:
            assert items[item, 3] == len(own)
            assert items[item, 1] == begin, f"item {item} leaves a gap"
            begin = items[item, 2]
            assert begin - items[item, 1] <= share * SPAN
        assert begin == length
        assert (np.diff(own) == 1).all()
    covered = (items[:, 2] - items[:, 1]).sum()
    assert covered == sum(visible), "an item outside any row's parts does work"
    assert work.merges[: len(merges)].tolist() == merges
    assert not work.merges[len(merges) :, 2].any()


def parts_of_rows(work: WorkList, num_rows: int) -> list[int]:
    items = np.asarray(work.items)
    return np.bincount(items[items[:, 1] < items[:, 2], 0], minlength=num_rows).tolist()


def test_decode_work_is_shared_out_by_length() -> None:
    even = compiled(jnp.full(8, 1024, jnp.int32), None, MAX_PARTS, SPAN)
    assert parts_of_rows(even, 8) == [2] * 8
    lengths = jnp.asarray([16 * 1024, 10, 10, 10], jnp.int32)
    uneven = compiled(lengths, None, MAX_PARTS, SPAN)
    assert parts_of_rows(uneven, 4) == [16, 1, 1, 1]
    assert np.asarray(uneven.merges)[:2].tolist() == [[0, 0, 16], [0, 0, 0]]
