"""CTAs that wrote parts of one result and share its merge: those with nothing else to do stay until
the last part is written, instead of another launch.

A CTA may wait for another only if that one runs: it may be one of a launch whose CTAs the GPU has
no room for yet, since another launch's wait in the same way. So each counts itself when it begins
its part, and one that has written its part stays only if all have begun.

A word of memory counts all three: parts begun, parts written, and CTAs that stay; another behind it
those that have read it in the end.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, cute

MOST = 1 << 10  # CTAs, less one
WRITTEN, BEGUN, STAYING = 1, MOST, MOST * MOST
LEAVES = -1


@cute.jit
def begin(words: cute.Pointer) -> None:
    """Count a part as begun. One thread calls it."""
    cute.arch.atomic_add(words, Int32(BEGUN), sem="relaxed", scope="gpu")


@cute.jit
def counts(words: cute.Pointer) -> Int32:
    """The counts so far, for `have_begun`: loaded early, and looked at when they are needed."""
    return cute.arch.load(words, Int32, sem="relaxed", scope="gpu")


def have_begun(counts: Int32, parts: Int32) -> Boolean:
    """Whether all parts have begun."""
    return counts // BEGUN % MOST == parts


@cute.jit
def meet(words: cute.Pointer, parts: Int32, stays: Boolean) -> tuple[Int32, Int32]:
    """Count a part as written and, if this CTA `stays`, wait for the others. Returns its number
    among those that merge, and how many they are; LEAVES if it is none of them.

    One thread calls it, after a barrier of all that wrote: it releases their writes, and acquires
    those of all parts. Of CTAs that do not stay, the last merges alone if none has stayed.
    """
    number, count = Int32(LEAVES), Int32(1)
    mine = Int32(WRITTEN + STAYING) if stays else Int32(WRITTEN)
    before = cute.arch.atomic_add(words, mine, sem="acq_rel", scope="gpu")
    now = before + mine
    if stays:
        while now % MOST != parts:
            now = cute.arch.load(words, Int32, sem="acquire", scope="gpu")
        number, count = before // STAYING, now // STAYING
    elif (now % MOST == parts) & (now < STAYING):
        number = Int32(0)
    return number, count


@cute.jit
def leave(words: cute.Pointer, count: Int32) -> None:
    """Count this CTA, one of `count` that merge, as one that reads the counts no more; the last
    resets the words to 0. One thread calls it, behind a barrier after `meet`."""
    read = cute.arch.atomic_add(words + 1, Int32(1), sem="relaxed", scope="gpu")
    if read == count - 1:
        cute.arch.store(words, Int32(0), sem="relaxed", scope="gpu")
        cute.arch.store(words + 1, Int32(0), sem="relaxed", scope="gpu")
