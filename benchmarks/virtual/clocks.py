"""Streams and events of the virtual device, in two kinds of time.

*Virtual seconds*: what a stream is given begins when the stream is free, when the host has launched it, and when what
the stream waits for has ended; it takes what the cost model says.

*Vector clocks* (Fidge 1988, Mattern 1989): what happens before what, however long anything takes. Each stream numbers
its operations, and knows of each other stream up to which number that has ended before its own next operation begins.
The host is the one that launches: all that it has waited for has ended before whatever is launched after that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class Moment:
    """A point in the work of a stream, or of the host. ``known``: stream → the number of its last operation that has
    ended by then. ``seconds``: the virtual time."""

    known: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    def join(self, other: Moment) -> None:
        """What comes after this moment comes after the other one too."""
        known = self.known
        for stream, number in other.known.items():
            if known.get(stream, 0) < number:
                known[stream] = number
        self.seconds = max(self.seconds, other.seconds)

    def copy(self) -> Moment:
        return Moment(dict(self.known), self.seconds)

    def is_after(self, stream: int, number: int) -> bool:
        return self.known.get(stream, 0) >= number


@dataclass
class Stream(Moment):
    """``busy``: seconds in which it has run something. ``priority``: below 0 is high, as on CUDA. ``waited``: what it
    knew of other streams when it was last asked (``Clocks.new_waits``)."""

    id: int = 0
    name: str = ""
    busy: float = 0.0
    priority: int = 0
    waited: dict[int, int] = field(default_factory=dict)


class Clocks:
    """All streams, events and the host of one device. ``links``: link → when its last collective has ended."""

    priorities: ClassVar[dict[int, int]] = {}  # of the streams of this process, which outlive a machine

    def __init__(self) -> None:
        self.host = Moment()
        self.streams = {0: Stream(id=0, name="the default stream")}
        self.events: dict[int, Moment] = {}
        self.links: dict[str, float] = {}

    def add(self, stream: int, name: str) -> Stream:
        made = Stream(id=stream, name=name, priority=self.priorities.get(stream, 0))
        return self.streams.setdefault(stream, made)

    def __getitem__(self, stream: int) -> Stream:
        return self.streams.get(stream) or self.add(stream, f"stream {stream}")

    def launch(self, stream: Stream, seconds: float, links: Collection[str] = ()) -> tuple[int, float]:
        """An operation at the end of a stream; its number, and when it begins. It waits until its links are free:
        collectives that share one run one after the other, in the order in which they were launched, as those of one
        communicator do whatever their streams are. That orders nothing that the program may rely on."""
        stream.join(self.host)
        number = stream.known[stream.id] = stream.known.get(stream.id, 0) + 1
        begin = max([stream.seconds, *(self.links.get(link, 0.0) for link in links)])
        stream.seconds = begin + seconds
        self.links.update(dict.fromkeys(links, stream.seconds))
        stream.busy += seconds
        return number, begin

    def new_waits(self, stream: Stream) -> dict[int, int]:
        """What a stream waits for before its next operation, and has not waited for before."""
        stream.join(self.host)
        waits = {s: n for s, n in stream.known.items() if s != stream.id and n > stream.waited.get(s, 0)}
        stream.waited.update(waits)
        return waits

    def record(self, event: int, stream: Stream) -> None:
        self.events[event] = stream.copy()
        self.events[event].join(self.host)  # an event is launched too

    def block(self, event: int, stream: Stream) -> None:
        """The stream goes on after the event; one that was never recorded holds nobody."""
        if event in self.events:
            stream.join(self.events[event])

    def wait_for(self, *moments: Moment) -> None:
        """The host waits."""
        for moment in moments:
            self.host.join(moment)

    @property
    def seconds(self) -> float:
        """When all is done that was launched."""
        return max([self.host.seconds, *(stream.seconds for stream in self.streams.values())])
