"""Rows of tokens in the global order of a training: a pure function of (seed, index of the row)."""

import math

import numpy as np

from .errors import DataError
from .shards import TokenStream

ROUNDS = 6
OFFSET_STREAM = 1 << 32  # keys from here on are for the epochs' offsets, those below for the permutations


class TextRows:
    """Windows of a token stream, shuffled anew in each epoch without any state.

    Row i is row i mod n of epoch i div n. An epoch cuts the stream into n rows of `sequence_length` tokens,
    from an offset in [0, sequence_length) of its own, so that the seams move between epochs, and takes them
    in an order of its own. n is one less than would fit without the offset (but at least 1).
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int):
        """DataError where the stream has not one row and the target that follows it."""
        if len(stream) < sequence_length + 1:
            raise DataError(
                f"{stream.name} has {len(stream):,} tokens, fewer than one row of {sequence_length:,} and "
                "the target after it; give more text or a smaller data.sequence_length"
            )
        self.stream, self.sequence_length, self.seed = stream, sequence_length, seed
        self.rows_per_epoch = max(len(stream) // sequence_length - 1, 1)
        self._offsets = min(sequence_length, len(stream) - self.rows_per_epoch * sequence_length)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows `first` to `first + count` of the global order, int64 (count, sequence_length + 1).

        The inputs are all tokens of a row but its last, the targets all but its first.
        """
        epoch, position = np.divmod(np.arange(first, first + count, dtype=np.int64), self.rows_per_epoch)
        place = permute(position.astype(np.uint64), self.rows_per_epoch, epoch_keys(self.seed, epoch))
        offset = (epoch_keys(self.seed, epoch, OFFSET_STREAM) % np.uint64(self._offsets)).astype(np.int64)
        starts = offset + place.astype(np.int64) * self.sequence_length
        return self.stream.windows(starts, self.sequence_length + 1)

    def fixed_rows(self, count: int) -> np.ndarray:
        """Up to `count` rows evenly over the stream, in its order, without overlap, the same for every seed.

        int64 (rows, sequence_length + 1), with fewer rows where the stream has no more.
        """
        fitting = (len(self.stream) - 1) // self.sequence_length
        count = min(count, fitting)
        place = np.arange(count, dtype=np.int64) * fitting // max(count, 1)
        return self.stream.windows(place * self.sequence_length, self.sequence_length + 1)


def epoch_keys(seed: int, epoch: np.ndarray, purpose: int = 0) -> np.ndarray:
    """A uint64 key for each of the epochs (n,), another one for each seed and purpose."""
    key = np.uint64(seed % (1 << 64))
    return mix(mix(epoch.astype(np.uint64) + np.uint64(purpose)) ^ mix(np.atleast_1d(key)))


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where each index in [0, n) goes in the pseudo-random permutation of [0, n) that its key names.

    uint64 arrays of one shape. A Feistel network over pairs (a, b), a < rows, b < columns, with additions
    modulo both instead of xor (Black and Rogaway, 2002, "generalized Feistel"), so that its domain is barely
    larger than n; an index that leaves [0, n) goes round again until it is back (cycle walking, ibid.).
    Memory does not depend on n.
    """
    rows = math.isqrt(n - 1) + 1
    columns = np.uint64(-(-n // rows))
    rows = np.uint64(rows)
    result, outside = index.copy(), np.arange(len(index))
    while len(outside):
        a, b = np.divmod(result[outside], columns)
        for number in range(0, ROUNDS, 2):
            a = (a + mix(b ^ (key[outside] + np.uint64(number))) % rows) % rows
            b = (b + mix(a ^ (key[outside] + np.uint64(number + 1))) % columns) % columns
        result[outside] = a * columns + b
        outside = outside[result[outside] >= np.uint64(n)]
    return result


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): a uint64 bijection whose bits all look random."""
    value = value + np.uint64(0x9E3779B97F4A7C15)  # uint64 arrays wrap, as it means them to
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
