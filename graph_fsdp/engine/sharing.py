"""The first rank makes the program of a model's first graph, and the other ranks take it.

[Note: one rank traces for all]
All ranks compile a model's first graph at the same time, and where its key (``programs/key.py``) is equal on them, so
are their programs. So the first of the model's ranks tells the others its key, traces, and sends them the program as it
is kept on disk. A rank with that key waits for it meanwhile, and runs it as one of an earlier start. A rank with
another key, with none, or with a program of its own waits for nothing. Who makes the program follows from the mesh.

Nothing is decided by what was sent: ranks agree on the order of collectives as they do on what each has made. What the
first rank raises ends the wait: the others then trace, and raise what they find themselves. Only a first graph is
shared, and only in the first attempt to compile it, as no rank knows which graphs others compile later; a graph that a
rank may have alone is not the first one. All read from one store, so a mesh of more than ``MOST_RANKS`` ranks shares
nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_fsdp.engine.ranks import Schedules
    from graph_fsdp.parameters.sharded import ShardedParameter
    from graph_fsdp.passes.ir.settings import Settings

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0  # with a first rank that lives and does not come: a rank that waits longer traces
MOST_RANKS = 1024  # that one store sends a program to; on a larger mesh each rank traces
MOST_CHARACTERS = 4 << 20  # of a message; torch's store takes no more than twice as many
_KEY, _PROGRAM = "key", "program"


class SharedProgram:
    """Sends the program of a model's first graph from the first of its ranks to the others."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules
        self._owed: list[str] = []  # messages of the first rank that others wait for
        self._may_take = False

    @contextlib.contextmanager
    def first_graph(self, settings: Settings, parameters: Collection[ShardedParameter]) -> Iterator[None]:
        """Compile a graph of these parameters in the block. If it is the first that the model's ranks have together,
        others wait for this one no longer than until the block ends."""
        schedules = self._schedules
        try:
            if not schedules.is_alone(settings, parameters) and schedules.meet() and len(schedules.ranks) <= MOST_RANKS:
                self._owed = [_KEY, _PROGRAM] if schedules.is_first else []
                self._may_take = not schedules.is_first
            yield
        finally:
            self._may_take = schedules.is_announced = False
            with contextlib.suppress(RuntimeError):  # the store is gone, as is what the others wait for
                for message in tuple(self._owed):
                    self._tell(message, None)

    def announce(self, key: Mapping[str, str] | None) -> None:
        """On the first rank, say which program it makes or has; None for one that no other rank can take."""
        self._tell(_KEY, None if key is None else dict(key))
        if key is None:
            self._owed = []

    def send(self, program: Callable[[], str] | None) -> None:
        """On the first rank, send the program that it has announced, as text; None where it cannot be written down."""
        if _PROGRAM not in self._owed:
            return
        sent = None if program is None else base64.b64encode(zlib.compress(program().encode())).decode()
        if sent is not None and len(sent) > MOST_CHARACTERS:
            log.info("the program of the first graph is not sent to other ranks: it has %d characters", len(sent))
            sent = None
        self._tell(_PROGRAM, sent)

    def take(self, key: Mapping[str, str]) -> dict[str, Any] | None:
        """On another rank, wait for the first one's program if that has this key. None if it is to be made here; the
        log says why."""
        if not self._may_take:
            return None
        self._may_take = False
        theirs = self._receive(_KEY)
        if theirs is None:
            log.info("this rank traces: the first rank makes no program that others can take")
            return None
        if differ := [name for name in key if theirs.get(name) != key[name]]:
            log.info("this rank traces: %s differ from those of the first rank", ", ".join(differ))
            return None
        log.info("this rank waits for the program that the first rank makes")
        sent = self._receive(_PROGRAM)
        if sent is None:
            log.info("this rank traces: the first rank has sent no program")
            return None
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(sent)))
        return found

    def _tell(self, message: str, said: Any) -> None:
        if message in self._owed:
            self._owed.remove(message)
            self._schedules.tell(message, json.dumps(said))

    def _receive(self, message: str) -> Any:
        said = self._schedules.told(message, PATIENCE_SECONDS)
        if said is None:
            log.info("the first rank has said nothing for %.0f seconds", PATIENCE_SECONDS)
        return None if said is None else json.loads(said)
