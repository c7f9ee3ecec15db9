"""How much memory a list of kernels takes: an executor and an allocator, simulated.

Which tensors are alive at once depends on the order in which TensorFlow's executor
runs kernels; how much memory they take, on how its allocator lays them out. Both are
played here on sizes alone.

*Executor* (tensorflow/core/common_runtime/executor.cc): kernels whose inputs are
there are ready. Small ones are run by the thread that made them ready; of the rest it
keeps the last for itself and offers the others to all threads, who take their own
newest, else another's oldest.

*Allocator* (tensorflow/core/common_runtime/bfc_allocator.cc): best fit with
coalescing, in regions each twice as large as the one before, which are never given
back. What counts is memory ever written to. On a CPU this holds for tensors from 256
KiB up; smaller ones come from malloc.
"""

from __future__ import annotations

import bisect
import collections
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfdpsq.run.estimation.estimate_graph import Flat

SMALL = 256 * 1024
_UNIT = 256  # sizes are rounded up to it
_FIRST_REGION = 2 << 20
_WASTE = 128 << 20  # a chunk with more than this to spare is split
# How long kernels take, in seconds: only their order depends on it.
_PER_KERNEL = 3e-6
_PER_FLOP = 1 / 60e9
_PER_BYTE = 1 / 8e9


class Allocator:
    """TensorFlow's best-fit allocator with coalescing, without the memory.

    Attributes:
      touched: bytes ever handed out, gaps between them included.
      used: bytes handed out now.
      most_used: the largest that `used` ever was.
    """

    def __init__(self):
        """No memory has been taken yet."""
        self.touched = 0
        self.used = self.most_used = 0
        self._small = self._most_small = 0
        self._next_region = _FIRST_REGION
        self._regions: list[list[int]] = []  # start, size, touched
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (size, start), sorted
        self._by_start: dict[int, int] = {}  # of free chunks
        self._by_end: dict[int, int] = {}
        self._starts: list[int] = []

    def allocate(self, size: int) -> tuple[int, int]:
        """Takes memory.

        Args:
          size: bytes.

        Returns:
          (start, bytes taken), which `free` wants back; start -1 for small sizes.
        """
        self.used += size
        self.most_used = max(self.most_used, self.used)
        if size < SMALL:
            self._small += size
            if self._small > self._most_small:
                self.touched += self._small - self._most_small
                self._most_small = self._small
            return -1, size
        rounded = -(-size // _UNIT) * _UNIT
        at = bisect.bisect_left(self._free, (rounded, -1))
        if at == len(self._free):
            self._extend(rounded)
            at = bisect.bisect_left(self._free, (rounded, -1))
        found, start = self._free[at]
        self._remove(found, start)
        if found >= 2 * rounded or found - rounded >= _WASTE:
            self._insert(found - rounded, start + rounded)
            found = rounded
        region = self._regions[bisect.bisect_right(self._starts, start) - 1]
        reached = start + rounded - region[0]
        if reached > region[2]:
            self.touched += reached - region[2]
            region[2] = reached
        return start, found

    def free(self, size: int, taken: tuple[int, int]) -> None:
        """Gives memory back.

        Args:
          size: what was asked for.
          taken: what `allocate` returned for it.
        """
        self.used -= size
        start, found = taken
        if start < 0:
            self._small -= found
            return
        # Chunks of different regions are never joined: one byte lies between.
        if start in self._by_end:
            before = self._by_end[start]
            self._remove(start - before, before)
            start, found = before, found + start - before
        if start + found in self._by_start:
            size_after = self._by_start[start + found]
            self._remove(size_after, start + found)
            found += size_after
        self._insert(found, start)

    def _extend(self, rounded: int) -> None:
        increased = False
        while rounded > self._next_region:
            self._next_region *= 2
            increased = True
        size = self._next_region
        if not increased:
            self._next_region *= 2
        self._regions.append([self._end, size, 0])
        self._starts.append(self._end)
        self._insert(size, self._end)
        self._end += size + 1

    def _insert(self, size: int, start: int) -> None:
        bisect.insort(self._free, (size, start))
        self._by_start[start] = size
        self._by_end[start + size] = start

    def _remove(self, size: int, start: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size, start))]
        del self._by_start[start]
        del self._by_end[start + size]


class Peak(NamedTuple):
    """What a step takes at most.

    Attributes:
      touched: bytes of memory in use by tensors of any kind, gaps included.
      alive: the most bytes of tensors at any one time.
      persistent: bytes of them that are there before and after, constants included.
    """

    touched: int
    alive: int
    persistent: int


def simulate(
    flat: Flat,
    persistent: Iterable[int],
    threads: int = 2,
    allocator: Allocator | None = None,
) -> Peak:
    """Runs a step on sizes alone.

    Args:
      flat: its kernels.
      persistent: bytes of each tensor that is there throughout: weights, optimizer
        slots, the batch.
      threads: how many kernels run at once.
      allocator: what to allocate from; a fresh one by default.

    Returns:
      The peak.
    """
    allocator = allocator or Allocator()
    total = 0
    for size in [*persistent, *flat.constants]:
        total += size
        allocator.allocate(size)
    _Executor(flat, allocator, threads).run()
    return Peak(allocator.touched, allocator.most_used, total)


class _Buffer:
    """Memory behind one or more tensors."""

    __slots__ = ("fixed", "references", "size", "taken")

    def __init__(self, size, taken, fixed=False):
        self.size = size
        self.taken = taken
        self.fixed = fixed
        self.references = 0


class _Executor:
    def __init__(self, flat: Flat, allocator: Allocator, threads: int):
        self._nodes, self._gathered = flat.nodes, flat.gathered
        self._allocator = allocator
        count = len(flat.nodes)
        self._waiting = [0] * count
        self._followers: list[list[int]] = [[] for _ in range(count)]
        # How many inputs each output goes to.
        self._uses: list[collections.Counter[int]] = [
            collections.Counter() for _ in range(count)
        ]
        for number, node in enumerate(flat.nodes):
            for producer in [p for p, _ in node.inputs] + list(node.controls):
                self._followers[producer].append(number)
                self._waiting[number] += 1
            for producer, slot in node.inputs:
                self._uses[producer][slot] += 1
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._views: set[tuple[int, int]] = set()
        self._queues: list[collections.deque[int]] = [
            collections.deque() for _ in range(threads)
        ]

    def run(self) -> None:
        """Plays every kernel."""
        ready = [n for n, waits in enumerate(self._waiting) if not waits]
        inline: list[collections.deque[int]] = [
            collections.deque() for _ in self._queues
        ]
        inline[0].extend(ready)
        events: list[tuple[float, int, int, list]] = []
        busy = [False] * len(self._queues)
        now, ran = 0.0, 0
        while True:
            for thread in range(len(self._queues)):
                while not busy[thread]:
                    number = self._next(thread, inline[thread])
                    if number is None:
                        break
                    temporaries = self._start(number)
                    length = self._length(number)
                    if self._nodes[number].inline:
                        self._finish(number, temporaries, thread, inline[thread])
                        ran += 1
                    else:
                        busy[thread] = True
                        heapq.heappush(
                            events, (now + length, thread, number, temporaries)
                        )
            if not events:
                break
            now, thread, number, temporaries = heapq.heappop(events)
            busy[thread] = False
            self._finish(number, temporaries, thread, inline[thread])
            ran += 1
        if ran != len(self._nodes):
            raise AssertionError(f"{len(self._nodes) - ran} kernels never ran")

    def _next(self, thread: int, inline) -> int | None:
        if inline:
            return inline.popleft()
        if self._queues[thread]:
            return self._queues[thread].pop()
        for other in self._queues:
            if other:
                return other.popleft()
        return None

    def _length(self, number: int) -> float:
        node = self._nodes[number]
        return _PER_KERNEL + max(node.flops * _PER_FLOP, node.moved * _PER_BYTE)

    def _start(self, number: int) -> list[_Buffer]:
        node = self._nodes[number]
        if node.fixed:
            for slot, size in enumerate(node.sizes):
                self._buffers[number, slot] = _Buffer(size, None, fixed=True)
            return []
        scratch = [self._made(size) for size in node.scratch]
        if node.updates in self._gathered:
            # Of a weight that rows are looked up in, TensorFlow keeps readers apart
            # from writers: the old memory goes when the new one is filled. What it is
            # changed by is as large.
            sizes = [self._nodes[p].sizes[slot] for p, slot in node.inputs]
            scratch.append(self._made(max(sizes)))
        for slot, size in enumerate(node.sizes):
            if not size:
                continue
            key = number, slot
            if node.shares[slot] >= 0:
                source = node.inputs[node.shares[slot]]
                self._buffers[key] = self._buffers[source]
                if node.view or source in self._views:
                    self._views.add(key)
            else:
                buffer = self._forwarded(node, size) if node.forwards else None
                self._buffers[key] = buffer or self._made(size)
            self._buffers[key].references += self._uses[number][slot]
        return scratch

    def _finish(self, number: int, scratch: Sequence[_Buffer], thread, inline) -> None:
        node = self._nodes[number]
        for buffer in scratch:
            self._allocator.free(buffer.size, buffer.taken)
        for source in node.inputs:
            self._release(source)
        for slot, size in enumerate(node.sizes):
            if size and not self._uses[number][slot]:
                self._dropped(self._buffers[number, slot])
        kept = None
        for follower in self._followers[number]:
            self._waiting[follower] -= 1
            if self._waiting[follower]:
                continue
            if self._nodes[follower].inline:
                inline.append(follower)
            else:
                if kept is not None:
                    self._queues[thread].append(kept)
                kept = follower
        if kept is not None:
            if inline:
                self._queues[thread].append(kept)
            else:
                inline.append(kept)

    def _made(self, size: int) -> _Buffer:
        return _Buffer(size, self._allocator.allocate(size))

    def _forwarded(self, node, size: int) -> _Buffer | None:
        for source in node.inputs:
            buffer = self._buffers.get(source)
            if (
                buffer is not None
                and buffer.size == size
                and buffer.references == 1
                and not buffer.fixed
                and source not in self._views
            ):
                return buffer
        return None

    def _release(self, source) -> None:
        buffer = self._buffers.get(source)
        if buffer is not None:
            buffer.references -= 1
            self._dropped(buffer)

    def _dropped(self, buffer: _Buffer) -> None:
        if buffer.references == 0 and buffer.taken is not None:
            self._allocator.free(buffer.size, buffer.taken)
            buffer.taken = None
