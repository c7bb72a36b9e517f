"""Messages that come late, in another order, twice, or never."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from tests.simulation.events import EventLoop

QUICK_SECONDS = 0.001


@define
class Weather:
    """Share of messages with each kind of fault."""

    lost: float = 0.12
    doubled: float = 0.24
    late: float = 0.04
    reordered: float = 0.42
    late_seconds: tuple[float, float] = (0.5, 9.0)
    reordered_seconds: tuple[float, float] = (0.01, 0.3)


class Network:
    """Carries messages between the parts of the simulation."""

    def __init__(self, loop: EventLoop, weather: Weather) -> None:
        self._loop = loop
        self._weather = weather
        self.calm = False
        """Whether all faults are over, so that everything can come to its end."""

    def send(self, kind: str, arrive: Callable[[], object], *, can_be_lost: bool = True) -> None:
        """Let ``arrive()`` happen once, later, twice or, if the transport may lose it, never."""
        weather, loop = self._weather, self._loop
        if self.calm:
            loop.after(QUICK_SECONDS, kind, arrive)
            return
        if can_be_lost and loop.chance(weather.lost):
            loop.after(QUICK_SECONDS, kind, _nothing, fault="lost message")
            return
        self._once(kind, arrive)
        if loop.chance(weather.doubled):
            pause = loop.random.uniform(0, 1.0 if loop.chance(0.7) else weather.late_seconds[1])
            loop.after(pause, kind, arrive, fault="doubled message")

    def _once(self, kind: str, arrive: Callable[[], object]) -> None:
        weather, loop = self._weather, self._loop
        fate = loop.random.random()
        if fate < weather.late:
            loop.after(loop.random.uniform(*weather.late_seconds), kind, arrive, fault="late message")
        elif fate < weather.late + weather.reordered:
            pause = loop.random.uniform(*weather.reordered_seconds)
            loop.after(pause, kind, arrive, fault="reordered message")
        else:
            loop.after(loop.random.expovariate(1 / QUICK_SECONDS), kind, arrive)


def _nothing() -> None:
    pass
