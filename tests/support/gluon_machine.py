"""The parts of one simulated program: partitions that take turns, barriers, and the order that these establish.

Every partition is a thread, and one of them runs at a time: at each step a random choice says who goes on and which TMA
load lands. So a failure comes back with its seed, and a deadlock is known at once rather than after a time.

The order is kept as vector clocks. An access to shared memory must be ordered after every earlier one that it conflicts
with: by luck late enough is not late enough.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

MEAN_DELAY = 6  # steps until a TMA load lands
MAX_BYTES = (1 << 20) - 1  # that a barrier can count

Clock = dict[Any, int]
Region = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides and offset in an allocation
_thread = threading.local()


class _Stopped(BaseException):
    """Ends a partition after another one has failed."""


def expect(condition: Any, message: str) -> None:
    """An assertion that does not depend on Python's flags."""
    if not condition:
        raise AssertionError(message)


def _join(clock: Clock, other: Clock) -> None:
    for actor, epoch in other.items():
        if clock.get(actor, 0) < epoch:
            clock[actor] = epoch


class Barrier:
    """An mbarrier. `phase` counts the completed phases; a wait sees only its parity."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count: int | None = None
        self.phase = self.missing = self.bytes = 0
        # What arrivals brought so far, and what had been brought when a phase completed last: (happened, fenced).
        self.gathered: tuple[Clock, Clock] = {}, {}
        self.published: tuple[Clock, Clock] = {}, {}

    def init(self, count: int) -> None:
        expect(self.count is None, f"{self.name} is initialised twice without mbarrier.invalidate")
        expect(count > 0, f"{self.name} is initialised with count {count}")
        self.count = self.missing = count
        self.phase += self.phase & 1  # even, and never lower than before: clocks hold it
        self.bytes = 0

    def check(self) -> None:
        expect(self.count is not None, f"{self.name} is used before mbarrier.init")

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def update(self, clock: Clock, fenced: Clock, arrivals: int = 0, nbytes: int = 0) -> None:
        self.check()
        expect(self.missing >= arrivals, f"{self.name} gets more arrivals than its count of {self.count}")
        self.missing -= arrivals
        self.bytes += nbytes
        expect(abs(self.bytes) <= MAX_BYTES, f"{self.name} has {self.bytes} bytes pending, more than it can count")
        for mine, theirs in zip(self.gathered, (clock, fenced)):
            _join(mine, theirs)
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            assert self.count is not None
            self.missing = self.count
            self.gathered[0][self] = self.phase
            self.published = dict(self.gathered[0]), dict(self.gathered[1])

    def __str__(self) -> str:
        state = f"{self.missing} of {self.count} arrivals and {self.bytes} bytes missing in phase {self.phase}"
        return f"{self.name} ({state})"


@dataclass
class Wait:
    """What a partition waits for; ``barrier`` is None while it waits for its own partitions."""

    barrier: Barrier | None
    parity: int
    children: Sequence[Partition] = ()
    since: float = field(default_factory=time.monotonic)

    def over(self) -> bool:
        return self.barrier.passed(self.parity) if self.barrier else all(child.ended for child in self.children)

    def __str__(self) -> str:
        return f"{self.barrier} with parity {self.parity}" if self.barrier else "its partitions"


class Partition:
    """The warps that run one function together, as one thread with a clock of its own."""

    def __init__(self, machine: Machine, name: str, num_warps: int, parent: Partition | None = None) -> None:
        self.machine, self.name, self.num_warps = machine, name, num_warps
        self.clock: Clock = dict(parent.clock) if parent else {}
        self.fenced: Clock = dict(parent.fenced) if parent else {}  # accesses that the async proxy sees in order
        self.clock[self] = 1
        if parent:
            parent.clock[parent] += 1
        self.stores: deque[Any] = deque()
        self.mmas: deque[Any] = deque()
        self.waiting: Wait | None = None
        self.ended = False
        self.result: Any = None
        self.baton = threading.Semaphore(0)
        self.weight = machine.random.choice((1, 4, 16))  # some run far ahead of others

    @property
    def epoch(self) -> int:
        return self.clock[self]

    def step(self, wait: Wait | None = None) -> None:
        self.machine.step(self, wait)

    def fence(self) -> None:
        self.fenced = dict(self.clock)
        self.clock[self] += 1

    def arrive(self, barrier: Barrier, count: int, nbytes: int = 0) -> None:
        barrier.update(self.clock, self.fenced, count, nbytes)
        self.clock[self] += 1

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.step(Wait(barrier, parity))
        _join(self.clock, barrier.published[0])
        _join(self.fenced, barrier.published[1])

    def wait_for(self, children: Sequence[Partition]) -> None:
        self.step(Wait(None, 0, children))
        for child in children:
            _join(self.clock, child.clock)
            _join(self.fenced, child.fenced)

    def drain_stores(self, left: int) -> None:
        while len(self.stores) > left:
            self.stores.popleft().finish(self)

    def drain_mmas(self, left: int) -> None:
        while len(self.mmas) > left:
            self.mmas.popleft().finish(self)

    def check_ended(self) -> None:
        expect(not self.stores, f"{self.name} ended with TMA stores in flight")
        expect(not self.mmas, f"{self.name} ended with warpgroup_mma in flight")

    def __str__(self) -> str:
        return self.name


class Machine:
    """One program: its partitions, its barriers and the TMA loads in flight. Who holds the baton runs."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.program, self.grid = program, grid
        self.random = random.Random(f"{seed}:{program}")
        self.live: list[Partition] = []
        self.landings: list[tuple[int, Callable[[], None]]] = []  # the step when due, what to do
        self.barriers: list[Barrier] = []
        self.steps = 0
        self.stepped = time.monotonic()
        self.error: BaseException | None = None
        self.running: Partition | None = None
        self.done = threading.Event()

    def start(self, partition: Partition, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        self.live.append(partition)
        thread = threading.Thread(target=self._body, args=(partition, function, args, kwargs), daemon=True)
        thread.start()

    def _body(self, partition: Partition, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
        _thread.partition = partition
        partition.baton.acquire()
        try:
            if self.error is None:
                with torch.no_grad():
                    partition.result = function(*args, **kwargs)
                    partition.check_ended()
                    self._leave(partition)
        except _Stopped:
            pass
        except BaseException as error:  # raised again by launch, whatever it is
            self.fail(error, partition)

    def _leave(self, partition: Partition) -> None:
        partition.ended = True
        self.live.remove(partition)
        if self.live:
            self._next().baton.release()
        else:
            expect(not self.landings, "the kernel ended with TMA loads in flight")
            for barrier in self.barriers:
                expect(barrier.bytes == 0, f"bytes that landed are not those expected: {barrier}")
            self.done.set()

    def fail(self, error: BaseException, partition: Partition | None = None) -> None:
        if self.error is None:
            self.error = error
            if partition is not None and hasattr(error, "add_note"):
                error.add_note(f"in partition {partition} of program {self.program}")
        for other in self.live:
            other.baton.release()
        self.done.set()

    def step(self, partition: Partition, wait: Wait | None) -> None:
        """Let others go on; come back when it is this partition's turn and ``wait`` is over."""
        if self.error is not None:
            raise _Stopped
        partition.waiting = wait
        chosen = self._next()
        if chosen is not partition:
            chosen.baton.release()
            partition.baton.acquire()
            if self.error is not None:
                raise _Stopped
        partition.waiting = None

    def _next(self) -> Partition:
        while True:
            self.steps += 1
            self.stepped = time.monotonic()
            self._land(self.steps)
            ready = [p for p in self.live if p.waiting is None or p.waiting.over()]
            if ready:
                self.running = self.random.choices(ready, [p.weight for p in ready])[0]
                return self.running
            if not self.landings:
                raise TimeoutError(f"deadlock: {self.waits()}")
            self._land(min(due for due, _ in self.landings))

    def waits(self) -> str:
        return "; ".join(f"{p} waits for {p.waiting}" for p in list(self.live) if p.waiting)

    def _land(self, now: int) -> None:
        landing = [action for due, action in self.landings if due <= now]
        self.landings = [entry for entry in self.landings if entry[0] > now]
        for action in landing:
            action()

    def later(self, action: Callable[[], None]) -> None:
        self.landings.append((self.steps + 1 + int(self.random.expovariate(1 / MEAN_DELAY)), action))

    def supervise(self, limit: float) -> None:
        """Until the program ends. What cannot be seen as a deadlock (a loop without end) is ended by the clock."""
        while not self.done.wait(min(limit / 4, 1.0)):
            now = time.monotonic()
            if now - self.stepped > limit:
                message = f"{self.running} has done nothing for {limit} s that the simulator sees"
                self.fail(TimeoutError(f"{message}; {self.waits()}"))
            for partition in list(self.live):
                wait = partition.waiting
                if wait is not None and wait.barrier is not None and now - wait.since > limit:
                    self.fail(TimeoutError(f"{partition} has waited {limit} s for {wait}"))
        if self.error is not None:
            raise self.error


def here() -> Partition:
    partition = getattr(_thread, "partition", None)
    if partition is None:
        raise RuntimeError("this function of a kernel works inside of gluon_sim.launch only")
    return partition


def step() -> Partition:
    partition = here()
    partition.step()
    return partition


@cache
def _elements(region: Region) -> frozenset[int]:
    sizes, strides, offset = region
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    return frozenset(torch.arange(last + 1).as_strided(*region).flatten().tolist())


@cache
def _overlap(one: Region, other: Region) -> bool:
    return not _elements(one).isdisjoint(_elements(other))


@cache
def _covers(one: Region, other: Region) -> bool:
    return _elements(one) >= _elements(other)


@dataclass(eq=False)
class Access:
    """``generic``: through the generic proxy, by loads and stores; the others are TMA's and the tensor cores'."""

    what: str
    name: str
    region: Region
    write: bool
    generic: bool
    actor: Partition | Barrier
    epoch: int
    pending: bool = False


class Allocation:
    """Remembers the accesses that a later one must be ordered after."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def add(self, new: Access, by: Partition) -> None:
        for old in self.accesses:
            if (old.write or new.write) and _overlap(old.region, new.region):
                self._check(old, new, by)
        self._forget(new)
        self.accesses.append(new)

    def settle(self, access: Access, epoch: int) -> None:
        access.pending, access.epoch = False, epoch
        self.accesses.remove(access)
        self._forget(access)
        self.accesses.append(access)

    def _check(self, old: Access, new: Access, by: Partition) -> None:
        whose = f"by {old.actor}" if isinstance(old.actor, Partition) else f"that signals {old.actor.name}"
        story = f"{new.what} of {new.name} by {by} after a {old.what} of {old.name} {whose}"
        expect(not old.pending, f"{story}, which is still in flight")
        expect(by.clock.get(old.actor, 0) >= old.epoch, f"{story}: nothing orders them")
        if old.generic and not new.generic:
            expect(by.fenced.get(old.actor, 0) >= old.epoch, f"{story} without fence_async_shared between them")

    def _forget(self, new: Access) -> None:
        """Drop what every access that is ordered after ``new`` is ordered after, too."""

        def implied(old: Access) -> bool:
            if old.pending:
                return False
            if new.write and not new.pending:
                return _covers(new.region, old.region)
            same = old.actor is new.actor and old.generic == new.generic and old.write == new.write
            return same and not new.pending and old.region == new.region

        self.accesses = [old for old in self.accesses if not implied(old)]
