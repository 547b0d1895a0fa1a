"""Which lane a trial takes: pure decisions, and what is learned about sharing a card."""

import pytest

from rigsweep.cluster.placement import Begin, Clear, House, Need, Seat, Sharing, Take, Wait, share_of

WIDE, NARROW, PAIR, ELASTIC = Need(), Need(0.5, 0.5, "narrow"), Need(2, 2), Need(1, 2)


def seat(name: str, *cards: int, share: float = 1.0, state: str = "idle", shape: str = "", promised=None) -> Seat:
    return Seat(name, cards, share, state, shape, promised)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("seats", "need", "step"),
    [
        ([], WIDE, Begin((0,), 1.0)),
        ([], NARROW, Begin((0,), 0.5)),
        ([], PAIR, Begin((0, 1), 1.0)),
        ([seat("a", 0)], WIDE, Take("a")),
        ([seat("a", 0, state="busy")], WIDE, Begin((1,), 1.0)),
        ([seat("a", 0, state="busy"), seat("b", 1, state="busy")], WIDE, Wait()),
        ([seat("a", 0, state="starting")], WIDE, Wait()),
        # A half waits for the half beside it: the other card stays whole.
        ([seat("a", 0, share=0.5, state="busy")], NARROW, Begin((0,), 0.5)),
        ([seat("a", 0, share=0.5), seat("b", 1)], NARROW, Take("a")),
        # Reshaping: only lanes that are idle, as few as it takes, and none where something is on its way.
        ([seat("a", 0), seat("b", 1, state="busy")], NARROW, Clear(("a",))),
        ([seat("a", 0, state="leaving"), seat("b", 1, state="busy")], NARROW, Wait()),
        ([seat("a", 0, share=0.5), seat("b", 0, share=0.5), seat("c", 1, state="busy")], WIDE, Clear(("a", "b"))),
        ([seat("a", 0, share=0.5), seat("b", 0, share=0.5, state="busy"), seat("c", 1, state="busy")], WIDE, Wait()),
        ([seat("a", 0), seat("b", 1)], PAIR, Clear(("a", "b"))),
        ([seat("a", 0), seat("b", 1, state="busy")], PAIR, Wait()),
        ([seat("a", 0, 1)], WIDE, Clear(("a",))),
        ([seat("a", 0, 1)], ELASTIC, Take("a")),
        # What is there is enough for one that can do with less.
        ([seat("a", 0), seat("b", 1, state="busy")], ELASTIC, Take("a")),
        ([seat("a", 0, state="busy"), seat("b", 1, state="busy")], ELASTIC, Wait()),
    ],
)
def test_a_trial_takes_what_suits_begins_what_is_missing_and_clears_what_is_in_the_way(seats, need, step) -> None:
    assert House([0, 1], seats).place(7, need) == step


def test_a_lane_that_starts_for_one_trial_is_not_waited_for_by_another() -> None:
    house = House([0, 1], [seat("a", 0, state="starting", promised=3)])
    assert house.place(3, WIDE) == Wait()
    assert house.place(4, WIDE) == Begin((1,), 1.0)


def test_a_lane_that_starts_for_nobody_is_promised_to_the_first_that_asks() -> None:
    house = House([0, 1], [seat("a", 0, state="starting")])
    assert house.place(3, WIDE) == Wait()
    assert house.seats[0].promised == 3
    assert house.place(4, WIDE) == Begin((1,), 1.0)


def test_shapes_that_do_not_go_together_are_kept_on_different_cards() -> None:
    refused = {frozenset(("narrow", "tiny"))}
    house = House([0, 1], [seat("a", 0, share=0.5, state="busy", shape="tiny"), seat("b", 0, share=0.5)], refused)
    assert house.place(1, NARROW) == Begin((1,), 0.5)
    house.seats.append(seat("c", 1, state="busy", shape="wide"))
    assert house.place(1, NARROW) == Wait()
    assert house.place(1, Need(0.5, 0.5, "other")) == Take("b")


def test_a_card_that_was_given_up_is_not_used() -> None:
    house = House([1])
    assert house.place(1, WIDE) == Begin((1,), 1.0)
    assert house.place(1, ELASTIC) == Begin((1,), 1.0)
    assert not house.suits(PAIR)
    assert house.suits(ELASTIC)
    assert not House([]).suits(NARROW)


@pytest.mark.parametrize(
    ("need_bytes", "share"), [(24e9, 1), (13e9, 1), (12e9, 1 / 2), (7e9, 1 / 3), (6e9, 1 / 4), (1e9, 1 / 4), (0, 1 / 4)]
)
def test_the_share_of_a_card_is_one_over_how_many_fit(need_bytes: float, share: float) -> None:
    assert share_of(need_bytes, 24e9) == share


@pytest.mark.parametrize(("least", "most"), [(0, 1), (2, 1), (1.5, 1.5), (0.5, 1), (1, 1.5)])
def test_a_need_that_nothing_can_serve_is_refused(least: float, most: float) -> None:
    with pytest.raises(ValueError, match="cards"):
        Need(least, most)


def needs(*speeds: float | None, alone: float | None = 100.0) -> dict[int, tuple[Need, float | None]]:
    return {number: (Need(0.5, 0.5, f"width {number}", alone), speed) for number, speed in enumerate(speeds, start=1)}


def test_sharing_that_makes_a_pair_slower_is_refused_once_both_have_been_heard_beside_each_other() -> None:
    sharing = Sharing()
    # Speeds of before they were together, then the first report of both, which is in part of before.
    for speeds in ((100.0, None), (100.0, 70.0), (60.0, 45.0), (45.0, 45.0)):
        assert sharing.see(0, needs(*speeds)) is None
    found = sharing.see(0, needs(44.0, 46.0))
    assert found == (frozenset(("width 1", "width 2")), pytest.approx(0.90))
    assert sharing.see(0, needs(43.0, 46.5)) is None, "it is said once"
    assert sharing.refused == {frozenset(("width 1", "width 2"))}


def test_sharing_that_pays_is_left_alone() -> None:
    sharing = Sharing()
    for speeds in ((100.0, None), (90.0, 70.0), (80.0, 75.0), (81.0, 74.0), (80.0, 76.0)):
        assert sharing.see(0, needs(*speeds)) is None
    assert not sharing.refused


def test_nothing_is_learned_of_trials_whose_speed_alone_is_not_known() -> None:
    sharing = Sharing()
    for speed in (10.0, 11.0, 12.0, 13.0, 14.0):
        assert sharing.see(0, needs(speed, speed + 0.5, alone=None)) is None
    assert not sharing.refused


def test_when_the_company_changes_what_was_heard_before_does_not_count() -> None:
    sharing = Sharing()
    for speeds in ((100.0, 99.0), (45.0, 45.0)):
        assert sharing.see(0, needs(*speeds)) is None
    assert sharing.see(0, needs(44.0)) is None
    assert sharing.see(0, needs(44.0, 46.0)) is None
    assert sharing.see(0, needs(43.0, 45.0)) is None
    assert not sharing.refused
