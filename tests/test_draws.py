"""Random draws by row."""

import numpy as np
import torch
from scipy import stats

from rigsweep.trainables.draws import normals, uniforms


def test_a_rows_numbers_are_its_own() -> None:
    rows = torch.arange(1000, 1064)
    whole = normals(5, 0, rows, 7)
    apart = torch.cat([normals(5, 0, rows[start : start + 9], 7) for start in range(0, 64, 9)])
    assert torch.equal(whole, apart)
    assert torch.equal(uniforms(5, 0, rows.flip(0), 3).flip(0), uniforms(5, 0, rows, 3))


def test_seeds_and_streams_have_nothing_in_common() -> None:
    rows = torch.arange(20_000)
    drawn = [normals(seed, stream, rows, 1)[:, 0].numpy() for seed in (0, 1, 2**31) for stream in (0, 1)]
    assert np.abs(np.corrcoef(drawn) - np.eye(6)).max() < 0.03


def test_they_have_their_distributions() -> None:
    rows = torch.arange(20_000)
    assert stats.kstest(uniforms(3, 1, rows, 5).flatten().numpy(), "uniform").pvalue > 0.001
    drawn = normals(3, 1, rows, 6).numpy()
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 0.001
    assert np.abs(np.cov(drawn.T) - np.eye(6)).max() < 0.04
    assert np.abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.03, "neighbours"
