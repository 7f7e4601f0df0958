"""PyTorch's caching allocator in bookkeeping only, fast enough for every tensor of a step.

    allocator = Allocator()
    block = allocator.malloc(3 * 2**20)
    allocator.free(block)
    allocator.reserved               # the segment stays

The rules are those of ``companion.memory.CachingAllocator``, which the memory chapter
explains; here free blocks are kept in order of size. Default settings, one stream.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch.
Standard library only: this file also runs in a browser.
"""
from bisect import bisect_left, insort

from .memory import MiB


class Block:
    """A part of a segment; ``left`` and ``right`` are its neighbors there."""
    __slots__ = ("size", "address", "small", "left", "right", "free")

    def __init__(self, size, address, small, left=None, right=None):
        self.size, self.address, self.small = size, address, small
        self.left, self.right, self.free = left, right, True


class Allocator:
    """``malloc(nbytes)`` gives a Block for ``free``; ``reserved`` and ``allocated`` in bytes."""

    def __init__(self):
        self.reserved = self.allocated = self.highest = self.next = 0
        self.pools = {True: [], False: []}   # small blocks, large blocks: (size, address, Block)

    def malloc(self, nbytes):
        size = -(-nbytes // 512) * 512 or 512
        small = size <= MiB
        pool = self.pools[small]
        i = bisect_left(pool, (size,))
        block = pool.pop(i)[2] if i < len(pool) else self._segment(size, small)
        rest = block.size - size
        if rest >= 512 if small else rest > MiB:
            tail = Block(rest, block.address + size, small, block, block.right)
            if block.right:
                block.right.left = tail
            block.right, block.size = tail, size
            insort(pool, (rest, tail.address, tail))
        block.free = False
        self.allocated += block.size
        if self.allocated > self.highest:
            self.highest = self.allocated
        return block

    def _segment(self, size, small):
        if small:
            total = 2 * MiB
        elif size < 10 * MiB:
            total = 20 * MiB
        else:
            total = -(-size // (2 * MiB)) * 2 * MiB
        block = Block(total, self.next, small)
        self.next += total
        self.reserved += total
        return block

    def free(self, block):
        self.allocated -= block.size
        left, right = block.left, block.right
        if right is not None and right.free:
            self._join(block, right, right)
        if left is not None and left.free:
            self._join(left, block, left)
            block = left
        block.free = True
        insort(self.pools[block.small], (block.size, block.address, block))

    def _join(self, first, second, free):
        """Two neighbors become one block; ``free`` is the one that was in the pool."""
        pool = self.pools[free.small]
        pool.pop(bisect_left(pool, (free.size, free.address)))
        first.size += second.size
        first.right = second.right
        if second.right is not None:
            second.right.left = first


def play(events, allocator, blocks):
    """Ask ``allocator`` for what a RecordingTape wrote down; blocks: by number, extended here."""
    malloc, free, add = allocator.malloc, allocator.free, blocks.append
    for event in events:
        if event > 0:
            add(malloc(event))
        else:
            free(blocks[-event])


SIDE = 2**60  # a multiple of it in an event: the number of a stream beside the main one


class Pools:
    """Allocators, one for each stream: blocks of one are never given to another."""

    def __init__(self):
        self.streams, self.allocated, self.highest = {}, 0, 0

    @property
    def reserved(self):
        return sum(a.reserved for a in self.streams.values())

    def malloc(self, event):
        """A block of ``event % SIDE`` bytes for stream ``event // SIDE``."""
        stream, nbytes = divmod(event, SIDE)
        block = self.streams.setdefault(stream, Allocator()).malloc(nbytes)
        self.allocated += block.size
        self.highest = max(self.highest, self.allocated)
        return stream, block

    def free(self, owned):
        stream, block = owned
        self.allocated -= block.size
        self.streams[stream].free(block)
