"""Which lane a trial takes, which is begun for it, and which has to go first: one pure function.

Lanes are slow to begin (an import, a CUDA context, a worker group) and free to reuse, so a lane that is there is
taken where one suits, and lanes are reshaped only where a trial could not run otherwise.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

_WHOLE = 1.0 - 1e-9  # shares such as three thirds add up to a hair less


@dataclass(frozen=True)
class Need:
    """What a trial asks of the machine: from `least` to `most` cards, or a share of one."""

    least: float = 1
    most: float = 1
    shape: str = ""
    """What it is, as far as sharing a card is concerned; trials of one shape are alike."""
    alone_per_second: float | None = None
    """Examples a second with a card to itself, where that is known."""

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most or (self.least != self.most and self.least < 1):
            raise ValueError(f"from {self.least:g} to {self.most:g} cards is nothing that a trial can have")
        if any(cards > 1 and cards != int(cards) for cards in (self.least, self.most)):
            raise ValueError(f"{self.most:g} cards: several workers take a whole card each")

    @property
    def share(self) -> float:
        """Of each of its cards: a part only of a single one."""
        return min(1.0, self.most)


@dataclass
class Seat:
    """A lane, as far as its place is concerned."""

    name: str
    cards: tuple[int, ...]
    share: float = 1.0
    """Of each of its cards."""
    state: Literal["starting", "idle", "busy", "leaving"] = "starting"
    shape: str = ""
    """Of the trial that is on it."""
    promised: int | None = None
    """The trial that it was begun for."""

    @property
    def size(self) -> float:
        """Cards that it has."""
        return len(self.cards) * self.share


@dataclass(frozen=True)
class Take:
    """Run on this lane."""

    name: str


@dataclass(frozen=True)
class Begin:
    """Begin a lane on these cards."""

    cards: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Clear:
    """End these lanes, which are idle, to make room."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Something has to come free, or is about to."""


@dataclass
class House:
    """The cards, the lanes on them, and which shapes do not go together."""

    cards: Sequence[int]
    seats: list[Seat] = field(default_factory=list)
    refused: Collection[frozenset[str]] = ()
    """Pairs of shapes (or one, with itself) that are slower together than one after the other."""

    def place(self, number: int, need: Need) -> Take | Begin | Clear | Wait:
        """What is to be done for a waiting trial."""
        if need.share < 1:
            return self._place_share(number, need)
        size = self._size(need)
        if size is None:
            return Wait()
        idle = [seat for seat in self.seats if seat.state == "idle" and seat.share == 1 and len(seat.cards) == size]
        if idle:
            return Take(idle[0].name)
        if self._is_coming(number, lambda seat: seat.share == 1 and len(seat.cards) == size):
            return Wait()
        free = [card for card in self.cards if self._left(card) >= _WHOLE]
        if len(free) >= size:
            return Begin(tuple(free[:size]), 1.0)
        # Fewest lanes first; those that are leaving already make room without being asked.
        rooms = [card for card in self.cards if self._left(card, without=("idle", "leaving")) >= _WHOLE]
        rooms.sort(key=lambda card: len(self._on(card, "idle")))
        return self._clear(rooms[:size]) if len(rooms) >= size else Wait()

    def suits(self, need: Need) -> bool:
        """Whether there are cards enough for it at all."""
        return len(self.cards) >= max(1, need.least)

    def _size(self, need: Need) -> int | None:
        """How many cards it gets: as many of `most` as nobody works on, if that is enough."""
        available = sum(self._left(card, without=("idle", "leaving", "starting")) >= _WHOLE for card in self.cards)
        size = min(int(need.most), available)
        return size if size >= need.least else None

    def _place_share(self, number: int, need: Need) -> Take | Begin | Clear | Wait:
        places = [card for card in self.cards if self._agrees(card, need.shape)]
        for seat in self.seats:
            if seat.state == "idle" and _same(seat.share, need.share) and seat.cards[0] in places:
                return Take(seat.name)
        if self._is_coming(number, lambda seat: _same(seat.share, need.share) and seat.cards[0] in places):
            return Wait()
        # The fullest card that has room, so that others stay whole.
        for card in sorted(places, key=self._left):
            if self._left(card) >= need.share - 1e-9:
                return Begin((card,), need.share)
        rooms = [card for card in places if self._left(card, without=("idle", "leaving")) >= need.share - 1e-9]
        rooms.sort(key=lambda card: (len(self._on(card, "busy")) == 0, len(self._on(card, "idle"))))
        return self._clear(rooms[:1]) if rooms else Wait()

    def _clear(self, cards: list[int]) -> Clear | Wait:
        names = dict.fromkeys(seat.name for card in cards for seat in self._on(card, "idle"))
        return Clear(tuple(names)) if names else Wait()

    def _is_coming(self, number: int, suits: Callable[[Seat], bool]) -> bool:
        """Whether a lane that suits is starting, for this trial or for nobody yet, who is then this one."""
        for seat in self.seats:
            if seat.state == "starting" and seat.promised == number and suits(seat):
                return True
        for seat in self.seats:
            if seat.state == "starting" and seat.promised is None and suits(seat):
                seat.promised = number
                return True
        return False

    def _on(self, card: int, state: str) -> list[Seat]:
        return [seat for seat in self.seats if card in seat.cards and seat.state == state]

    def _left(self, card: int, without: Iterable[str] = ()) -> float:
        return 1.0 - sum(seat.share for seat in self.seats if card in seat.cards and seat.state not in without)

    def _agrees(self, card: int, shape: str) -> bool:
        return all(frozenset((seat.shape, shape)) not in self.refused for seat in self._on(card, "busy"))


def share_of(need_bytes: float, card_bytes: float, smallest: float = 0.25) -> float:
    """The share of a card that holds so many bytes: 1, 1/2, 1/3, … down to `smallest`."""
    parts = int(card_bytes // need_bytes) if need_bytes > 0 else round(1 / smallest)
    return 1.0 / max(1, min(parts, round(1 / smallest)))


def _same(one: float, other: float) -> bool:
    return abs(one - other) < 1e-6


@dataclass
class _Neighbour:
    shape: str
    alone_per_second: float
    seen: list[float] = field(default_factory=list)
    """What it said of its speed since the company on its card last changed, each time it said something new."""


class Sharing:
    """Learns from what trials on one card say of their speed whether sharing it pays.

    It pays where the speeds, each as a share of what the trial reaches alone, add up to more than 1: then two go
    faster together than one after the other.
    """

    def __init__(self) -> None:
        self.refused: set[frozenset[str]] = set()
        self._companies: dict[int, dict[int, _Neighbour]] = {}

    def see(self, card: int, trials: dict[int, tuple[Need, float | None]]) -> tuple[frozenset[str], float] | None:
        """What runs on a card now: each trial's need and its newest speed, in examples a second.

        Answers once for each pair of shapes that is slower together, with the sum of the shares.
        """
        known = {
            number: (need.shape, need.alone_per_second, speed)
            for number, (need, speed) in trials.items()
            if need.alone_per_second
        }
        company = self._companies.get(card, {})
        if company.keys() != trials.keys() or len(known) < len(trials) or len(trials) != 2:
            self._companies[card] = {
                number: _Neighbour(shape, alone, [] if speed is None else [speed])
                for number, (shape, alone, speed) in known.items()
                if alone
            }
            return None
        for number, (_, _, speed) in known.items():
            seen = company[number].seen
            if speed is not None and (not seen or seen[-1] != speed):
                seen.append(speed)
        # The first may be from before, and the second in part.
        if any(len(neighbour.seen) < 3 for neighbour in company.values()):
            return None
        together = sum(neighbour.seen[-1] / neighbour.alone_per_second for neighbour in company.values())
        pair = frozenset(neighbour.shape for neighbour in company.values())
        if together >= 1 or pair in self.refused:
            return None
        self.refused.add(pair)
        return pair, together
