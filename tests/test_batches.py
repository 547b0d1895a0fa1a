"""The global order of rows of tokens."""

import numpy as np
import pytest

from rigsweep.datasets.batches import TextRows, mix, permute
from rigsweep.datasets.errors import DataError
from rigsweep.datasets.shards import TokenStream


def stream(tokens: int, shard: int = 1_000) -> TokenStream:
    row = np.arange(tokens).astype(np.uint32)
    return TokenStream("the training part of x", [row[at : at + shard] for at in range(0, tokens, shard)])


def order(n: int, key: int) -> np.ndarray:
    keys = mix(np.full(n, key, dtype=np.uint64))
    return permute(np.arange(n, dtype=np.uint64), n, keys)


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1_000, 4_097, 65_536, 100_003])
def test_a_permutation_is_a_bijection(n: int):
    for key in (0, 1, 2**63):
        assert np.array_equal(np.sort(order(n, key)), np.arange(n))


def test_permutations_look_random():
    n = 10_000
    orders = np.stack([order(n, key) for key in range(8)]).astype(np.float64)
    correlations = np.corrcoef(np.vstack([orders, np.arange(n)]))
    assert np.abs(correlations - np.eye(9)).max() < 0.05
    assert np.abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 0.05
    # Where one place of a small permutation goes is even over many keys (chi-squared, 9 degrees of freedom).
    counts = np.bincount([int(order(10, key)[3]) for key in range(2_000)], minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 30


def test_memory_does_not_grow_with_the_corpus():
    n = 10**12
    index = np.array([0, 1, n - 1], dtype=np.uint64)
    assert (permute(index, n, mix(np.zeros(3, dtype=np.uint64))) < n).all()


def test_windows_cross_shards():
    whole = stream(5_000, shard=7)
    starts = np.array([0, 6, 7, 4_900, 123])
    assert np.array_equal(whole.windows(starts, 100), starts[:, None] + np.arange(100))
    assert whole.windows(starts, 100).dtype == np.int64
    assert whole.windows(np.array([], dtype=np.int64), 5).shape == (0, 5)
    for wrong in (-1, 4_901):
        with pytest.raises(IndexError):
            whole.windows(np.array([wrong]), 100)


def test_an_epoch_takes_each_window_once():
    rows = TextRows(stream(10_000), 64, seed=3)
    taken = rows.rows(0, rows.rows_per_epoch)
    assert np.array_equal(taken, taken[:, :1] + np.arange(65))
    starts = np.sort(taken[:, 0])
    assert (np.diff(starts) == 64).all() and 0 <= starts[0] < 64
    assert rows.rows_per_epoch == 10_000 // 64 - 1


def test_rows_do_not_depend_on_how_they_are_asked_for():
    rows = TextRows(stream(3_000), 32, seed=1)
    together = rows.rows(0, 300)  # over three epochs
    assert np.array_equal(together, np.concatenate([rows.rows(at, 1) for at in range(300)]))
    assert np.array_equal(together[77:200], TextRows(stream(3_000), 32, seed=1).rows(77, 123))
    assert rows.rows(5, 0).shape == (0, 33)


def test_epochs_and_seeds_differ_in_order_and_in_windows():
    rows = TextRows(stream(20_000), 64, seed=0)
    n = rows.rows_per_epoch
    epochs = [rows.rows(epoch * n, n)[:, 0] for epoch in range(20)]
    assert len({int(starts.min()) for starts in epochs}) > 10
    places = [tuple((starts - starts.min()) // 64) for starts in epochs]
    assert len(set(places)) == 20
    assert not np.array_equal(TextRows(stream(20_000), 64, seed=1).rows(0, n)[:, 0], epochs[0])
    assert TextRows(stream(20_000), 64, seed=-5).rows(0, 1).shape == (1, 65)


@pytest.mark.parametrize("tokens", [65, 66, 127, 128, 129, 192])
def test_a_stream_of_hardly_a_row_still_gives_rows(tokens: int):
    rows = TextRows(stream(tokens), 64, seed=0)
    taken = rows.rows(0, 50)
    assert taken.shape == (50, 65) and taken.max() < tokens
    assert len(np.unique(taken[:, 0])) >= min(tokens - 64, 10)


def test_a_stream_shorter_than_a_row_is_refused():
    with pytest.raises(DataError, match=r"the training part of x has 64 tokens, fewer than one row of 64 ") as e:
        TextRows(stream(64), 64, seed=0)
    assert "\n" not in str(e.value)


def test_fixed_rows_are_even_without_overlap_and_never_change():
    rows = TextRows(stream(10_001), 100, seed=0)
    starts = rows.fixed_rows(10)[:, 0]
    assert np.array_equal(starts, np.arange(10) * 1_000)
    everything = rows.fixed_rows(10_000)
    assert np.array_equal(everything[:, 0], np.arange(100) * 100)
    assert np.array_equal(rows.fixed_rows(7), TextRows(stream(10_001), 100, seed=9).fixed_rows(7))
    assert len(np.unique(rows.fixed_rows(99)[:, 0])) == 99
    assert rows.fixed_rows(0).shape == (0, 101)
