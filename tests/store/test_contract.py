"""What every store keeps to, in memory and on disk."""

from __future__ import annotations

import threading

import pytest
import torch

from rolling_kv.errors import StoreError
from rolling_kv.kv import SegmentKV
from rolling_kv.store.base import KVStore
from tests.store.samples import assert_same, in_dtype, kv_of, lineage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kv_comes_back_to_the_bit(store: KVStore, dtype: str) -> None:
    where = lineage(7, 8, 9, identity=in_dtype(dtype))
    kv = kv_of(where)
    kv.k.view(-1)[:4] = torch.tensor([0.0, -0.0, float("inf"), 1e-7])
    store.put(where, kv)
    assert_same(store.get(where), kv)
    assert store.check_integrity() == []


def test_a_lineage_that_was_never_stored_is_none(store: KVStore) -> None:
    assert store.get(lineage(7)) is None
    store.put(lineage(7), kv_of(lineage(7)))
    assert store.get(lineage(8)) is None
    assert len(store) == 1


def test_many_are_found_in_their_order(store: KVStore, threads: int) -> None:
    wheres = [lineage(number) for number in range(11)]
    for where in wheres[::2]:
        store.put(where, kv_of(where))
    found = store.get_many([*reversed(wheres), wheres[4]])
    for where, kv in zip([*reversed(wheres), wheres[4]], found, strict=True):
        if where in wheres[::2]:
            assert not isinstance(kv, StoreError)
            assert_same(kv, kv_of(where))
        else:
            assert kv is None
    assert store.get_many([]) == []


def test_storing_again_changes_nothing(store: KVStore) -> None:
    where = lineage(7, 8)
    first = kv_of(where, seed=1)
    store.put(where, first)
    store.put(where, kv_of(where, seed=2))
    assert_same(store.get(where), first)
    assert len(store) == 1
    assert store.check_integrity() == []


def test_namespaces_never_share(store: KVStore) -> None:
    mine, theirs = lineage(7, namespace="mine"), lineage(7, namespace="theirs")
    store.put(mine, kv_of(mine, seed=1))
    assert store.get(theirs) is None
    store.put(theirs, kv_of(theirs, seed=2))
    assert_same(store.get(mine), kv_of(mine, seed=1))
    assert_same(store.get(theirs), kv_of(theirs, seed=2))
    assert len(store) == 2


def test_equal_ids_after_other_segments_are_other_kv(store: KVStore) -> None:
    one, other = lineage(7, before=[(1, 2)]), lineage(7, before=[(1,), (2,)])
    store.put(one, kv_of(one, seed=1))
    assert store.get(other) is None


def test_keys_and_values_may_be_parts_of_one_tensor(store: KVStore) -> None:
    """As they are when a pass returns them stacked, and neither is contiguous."""
    where = lineage(7, 8)
    both = torch.randn(2, 3, 2, 2, 4)  # [layers, heads, keys and values, tokens, head_dim]
    kv = SegmentKV(k=both[:, :, 0], v=both[:, :, 1], token_ids=(7, 8), start=3)
    store.put(where, kv)
    assert_same(store.get(where), kv)


def test_keys_and_values_may_be_one_tensor(store: KVStore) -> None:
    where = lineage(7, 8)
    values = torch.randn(2, 3, 2, 4)
    kv = SegmentKV(k=values, v=values, token_ids=(7, 8), start=3)
    store.put(where, kv)
    assert_same(store.get(where), kv)


def test_several_threads_may_store_one_segment_at_once(store: KVStore) -> None:
    wheres = [lineage(i) for i in range(8)]
    kvs = [kv_of(where) for where in wheres]
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            for where, kv in zip(wheres, kvs, strict=True):
                barrier.wait(timeout=20)
                store.put(where, kv)
                assert_same(store.get(where), kv)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store) == len(wheres)
    assert store.check_integrity() == []
