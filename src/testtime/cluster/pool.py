"""A pool of Ray actors that survives the death of any of them, and of their machines.

Ray's own restarts wait for the resources that an actor had; on a cluster that lost a machine that is forever, and with
it waits what was given to the actor. Here the others go on with it, and a new actor joins when there is room for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from testtime.errors import TesttimeError

IN_FLIGHT = 3  # pieces of work given to an actor at a time: two in progress, and one on its way
WINDOW = 8  # pieces per actor between the oldest in progress and the newest
TRIES = 5  # deaths of actors that one piece of work, or the start of new actors in a row, may see


class Pool:
    """`size` actors that `make` returns, each with the methods `start()` and `work(piece)`."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self.make = make
        self.given: dict[Any, int] = {}  # the actors that have started, and how many pieces each has
        self.starting: dict[Any, Any] = {}  # actors by what `start` will return
        self.running: dict[Any, tuple[Any, int]] = {}  # actor and number of a piece, by what `work` will return
        self.pieces: dict[int, Any] = {}  # pieces that are not finished, by number
        self.waiting: list[int] = []  # those that lost their actor
        self.deaths: Counter[int | None] = Counter()  # by piece; None for those while starting
        self.size = size
        for _ in range(size):
            self._start()

    def map(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """What `work` returns for each piece, in order."""
        results: dict[int, Any] = {}
        taken = returned = 0
        more = True
        while True:
            while (actor := self._free()) is not None and (
                self.waiting or (more and taken - returned < WINDOW * self.size)
            ):
                if self.waiting:
                    self._give(actor, self.waiting.pop(0))
                elif (piece := next(pieces, None)) is not None:
                    self.pieces[taken] = piece
                    self._give(actor, taken)
                    taken += 1
                else:
                    more = False
            if not more and returned == taken:
                return
            self._wait(results)
            while returned in results:
                yield results.pop(returned)
                returned += 1

    def close(self) -> None:
        """End all actors."""
        import ray

        for actor in [*self.given, *self.starting.values()]:
            ray.kill(actor)
        self.given, self.starting, self.running = {}, {}, {}

    def _start(self) -> None:
        actor = self.make()
        self.starting[actor.start.remote()] = actor

    def _free(self) -> Any | None:
        """The actor with the fewest pieces, if it may have another."""
        actor = min(self.given, key=self.given.__getitem__, default=None)
        return actor if actor is not None and self.given[actor] < IN_FLIGHT else None

    def _give(self, actor: Any, number: int) -> None:
        self.given[actor] += 1
        self.running[actor.work.remote(self.pieces[number])] = actor, number

    def _wait(self, results: dict[int, Any]) -> None:
        """Wait until an actor has started, finished a piece, or died."""
        import ray

        for ready in ray.wait([*self.running, *self.starting], fetch_local=False)[0]:
            actor, number = self.running.pop(ready) if ready in self.running else (self.starting.pop(ready), None)
            try:
                result = ray.get(ready)
            except ray.exceptions.RayTaskError as problem:
                cause = problem.cause
                if isinstance(cause, TesttimeError):
                    raise type(cause)(str(cause)) from None
                raise TesttimeError(f"A worker on Ray failed: {type(cause).__name__}: {cause}") from problem
            except ray.exceptions.RayError as problem:  # the actor died, or what it returned is lost with its machine
                self._replace(actor, number, problem)
                continue
            if number is None:
                self.given[actor] = 0
                self.deaths.pop(None, None)
            else:
                if actor in self.given:  # or else it has died since
                    self.given[actor] -= 1
                results[number] = result
                del self.pieces[number]

    def _replace(self, actor: Any, number: int | None, problem: Exception) -> None:
        """Another actor for one that died, maybe with a piece, which goes to the next that is free."""
        import ray

        self.deaths[number] += 1
        if self.deaths[number] >= TRIES:
            reason = str(problem).strip().splitlines()[0]
            raise TesttimeError(f"Workers on Ray end again and again, maybe for lack of memory: {reason}")
        if number is not None:
            self.waiting.append(number)
            self.waiting.sort()
        if number is None or self.given.pop(actor, None) is not None:  # not yet replaced
            ray.kill(actor)
            self._start()
