"""Buffers come back by themselves, never while something looks at them, and are never too many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rolling_kv.engine.buffers import Buffers

MIB = 1 << 20


def test_memory_is_taken_again_once_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take((3, 4, MIB // 8), torch.float32)
    where = first.data_ptr()
    assert where % 64 == 0
    del first
    assert buffers.idle_bytes >= 6 * MIB
    again = buffers.take((1, 12, MIB // 8 - 100), torch.float32)
    assert again.data_ptr() == where
    assert again.shape == (1, 12, MIB // 8 - 100)
    assert buffers.idle_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_view_keeps_its_memory(dtype: torch.dtype) -> None:
    buffers = Buffers()
    buffer = buffers.take((2, MIB), dtype)
    view = buffer.fill_(7)[1, 5:50].reshape(5, 9)
    del buffer
    assert buffers.idle_bytes == 0
    others = [buffers.take((2, MIB), dtype).fill_(3) for _ in range(3)]
    assert view.dtype == dtype
    assert bool((view == 7).all())
    del view, others
    assert buffers.idle_bytes > 0


def test_what_is_kept_and_given_is_no_more_than_was_given_at_once() -> None:
    buffers = Buffers()
    small = [buffers.take((MIB,), torch.float32) for _ in range(8)]  # 32 MiB
    most = 8 * small[0].nbytes
    del small
    assert buffers.idle_bytes >= most
    held = [buffers.take((3 * MIB,), torch.float32) for _ in range(2)]  # 24 MiB, too large for what is idle
    assert sum(one.nbytes for one in held) + buffers.idle_bytes <= most * 1.125
    more = [buffers.take((3 * MIB,), torch.float32) for _ in range(4)]
    assert buffers.idle_bytes == 0
    del held, more
    assert 6 * 12 * MIB <= buffers.idle_bytes <= 6 * 12 * MIB * 1.125


def test_small_buffers_are_left_to_malloc() -> None:
    buffers = Buffers()
    assert buffers.take((7, 9), torch.float32).shape == (7, 9)
    assert buffers.take((0, 9), torch.float32).shape == (0, 9)
    assert buffers.idle_bytes == 0


def test_threads_never_share_a_buffer() -> None:
    buffers = Buffers()

    def work(number: int) -> bool:
        for _ in range(40):
            mine = [buffers.take((MIB // 2,), torch.float32).fill_(number) for _ in range(2)]
            if not all(bool((one == number).all()) for one in mine):
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(12)))
