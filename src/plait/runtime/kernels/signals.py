"""Flags between ranks, filled and emptied from inside kernels.

A flag is one int32 in symmetric memory: 0 is empty, 1 is full. The producer fills the flag that lies
on the consumer's device, the consumer empties it. Emptying it is part of the wait, so a captured graph
can be replayed any number of times without a reset, and nothing in the graph depends on the replay.

`fill` releases what its program (all threads) wrote before; `drain` acquires what the filler released.
Both wait for the opposite state, so a producer that is one turn ahead waits instead of losing a signal.
"""

import triton
import triton.language as tl


@triton.jit
def fill(flag):
    tl.debug_barrier()  # the release below is one thread's; it must cover the others' stores
    while tl.atomic_cas(flag, 0, 1, sem="release", scope="sys") != 0:
        pass


@triton.jit
def drain(flag):
    while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()


@triton.jit
def enter(fills, drains):
    """Program 0 fills `fills`; all programs go on when `drains` are full (`leave` empties them)."""
    if fills is not None:
        if tl.program_id(0) == 0:
            for i in tl.static_range(len(fills)):
                fill(fills[i])
    if drains is not None:
        for i in tl.static_range(len(drains)):
            while tl.atomic_add(drains[i], 0, sem="acquire", scope="sys") != 1:
                pass
        tl.debug_barrier()


@triton.jit
def leave(arrivals, entered, fills, drains):
    """The last program of the grid to come here empties `entered`, fills `fills`, drains `drains`.

    What all programs wrote is released. `arrivals` is an int32 on this device, 0 before the launch
    and 0 after it.
    """
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrivals, 0)
        if entered is not None:
            for i in tl.static_range(len(entered)):
                tl.store(entered[i], 0)
        if fills is not None:
            for i in tl.static_range(len(fills)):
                fill(fills[i])
        if drains is not None:
            for i in tl.static_range(len(drains)):
                drain(drains[i])


@triton.jit
def meet(flags, phase, RANK: tl.constexpr):
    """This program and its namesakes on all ranks have come here; `flags`: [phases, programs, ranks]."""
    RANKS: tl.constexpr = len(flags)
    row = (phase * tl.num_programs(0) + tl.program_id(0)) * RANKS
    for step in tl.static_range(1, RANKS):
        fill(flags[(RANK + step) % RANKS] + row + RANK)
    for step in tl.static_range(1, RANKS):
        drain(flags[RANK] + row + (RANK + step) % RANKS)


@triton.jit
def fill_kernel(flags):
    for i in tl.static_range(len(flags)):
        fill(flags[i])


@triton.jit
def drain_kernel(flags):
    for i in tl.static_range(len(flags)):
        drain(flags[i])
