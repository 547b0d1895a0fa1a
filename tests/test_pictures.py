"""Pictures for people: their size, what stands where, and that the same input is the same picture."""

import numpy as np
import pytest

from rigsweep.trainables import pictures


def images(amount: int, size: int = 8, channels: int = 3) -> np.ndarray:
    shades = np.arange(amount, dtype=np.uint8) * 9
    return np.broadcast_to(shades[:, None, None, None], (amount, size, size, channels)).copy()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_holds_every_image_in_its_place(channels: int) -> None:
    found = pictures.grid(images(10, channels=channels), columns=4)
    assert found.shape == (3 * 50 - 2, 4 * 50 - 2, 3) and found.dtype == np.uint8
    for number in range(10):
        row, column = divmod(number, 4)
        cell = found[row * 50 : row * 50 + 48, column * 50 : column * 50 + 48]
        assert (cell == number * 9).all()
    assert (found[100:148, 100:] == 255).all(), "the last row is not full"


def test_small_images_are_enlarged_and_large_ones_left() -> None:
    checks = np.indices((8, 8)).sum(0) % 2 * np.uint8(255)
    small = pictures.grid(checks[None, :, :, None].astype(np.uint8), columns=1)
    assert small.shape == (48, 48, 3) and set(np.unique(small)) == {0, 255}
    assert np.array_equal(small[::6, ::6, 0], checks)
    assert pictures.grid(images(1, size=64), columns=1).shape == (64, 64, 3)


def test_names_stand_beside_and_above() -> None:
    bare = pictures.grid(images(4), columns=2)
    named = pictures.grid(images(4), 2, ["w = 0", "w = 1"], ["zero", "a name that is far too long for its column"])
    assert named.shape[0] == bare.shape[0] + 26 and named.shape[1] > bare.shape[1]
    assert np.array_equal(named[26:, -bare.shape[1] :], bare), "names cover no image"
    assert named[:26].min() < 120 and named[26:, : named.shape[1] - bare.shape[1]].min() < 120
    assert np.array_equal(named, pictures.grid(images(4), 2, ["w = 0", "w = 1"], ["zero", "a name that is far too lo"]))


def test_points_are_a_panel_each() -> None:
    generator = np.random.default_rng(0)
    drawn = generator.normal(size=(500, 2))
    two = pictures.points({"data": drawn, "samples": drawn})
    three = pictures.points({"data": drawn, "samples": drawn}, generator.normal(size=(5, 20, 2)))
    assert two.dtype == np.uint8 and two.shape[2] == 3 and three.shape[1] > two.shape[1]
    assert np.array_equal(two, pictures.points({"data": drawn, "samples": drawn}))
    assert two.std() > 5, "something is drawn"
