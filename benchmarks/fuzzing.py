"""Damaged files of any kind: mutations from a seed, what became of each file, and the table of it.

A fuzzer says what it mutates and how it reads: `fuzz_scans` medical images, `fuzz_files` everything else.
"""

import argparse
import collections
import faulthandler
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from camscope.errors import CamscopeError

SECONDS, MEGABYTES = 2.0, 256
Mutation = Callable[[bytearray, np.random.Generator], bytes]
Damaged = tuple[str, str, bytes]  # the file's name, the mutation, the bytes


@dataclass(frozen=True)
class Outcome:
    """What became of one file."""

    kind: str
    mutation: str
    result: str
    seconds: float  # of the processor: other programs do not count
    megabytes: float

    @property
    def bad(self) -> bool:
        """Whether it is what may not be."""
        return self.result.startswith("!") or self.seconds > SECONDS or self.megabytes > MEGABYTES


def outcome(kind: str, mutation: str, read: Callable[[], str]) -> Outcome:
    """One file, read. `read`: says what it is; a CamscopeError is right too, any other error is not."""
    before, begin = peak(), time.process_time()
    try:
        result = read()
    except CamscopeError as error:
        result = "damaged" if "damaged" in str(error) else "refused"
    except (Exception, SystemExit) as error:
        result = f"!{type(error).__name__}: {str(error)[:200]}"
    return Outcome(kind, mutation, result, time.process_time() - begin, peak() - before)


def peak() -> float:
    """MiB that the process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def flipped(data: bytearray, rng: np.random.Generator) -> bytes:
    """Some bits anywhere are others."""
    for at in rng.integers(len(data), size=rng.integers(1, 17)):
        data[at] ^= 1 << rng.integers(8)
    return bytes(data)


def flipped_header(data: bytearray, rng: np.random.Generator) -> bytes:
    """Some bytes at the beginning are others."""
    for at in rng.integers(min(len(data), 3000), size=rng.integers(1, 9)):
        data[at] = rng.integers(256)
    return bytes(data)


def cut(data: bytearray, rng: np.random.Generator) -> bytes:
    """The end is missing."""
    return bytes(data[: max(1, int(rng.integers(len(data))))])


def without_a_block(data: bytearray, rng: np.random.Generator) -> bytes:
    """A piece in the middle is missing."""
    at = rng.integers(len(data))
    del data[at : at + rng.integers(1, 600)]
    return bytes(data) or b"\0"


def doubled_block(data: bytearray, rng: np.random.Generator) -> bytes:
    """A piece is there twice."""
    at = int(rng.integers(len(data)))
    return bytes(data[:at] + data[max(0, at - 200) :])


def zeroed(data: bytearray, rng: np.random.Generator) -> bytes:
    """A piece is all zeros."""
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 300))
    data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


DAMAGE: tuple[Mutation, ...] = (flipped, flipped_header, cut, without_a_block, doubled_block, zeroed)


def options(text: str | None, count: int) -> argparse.Namespace:
    """`--count`, `--seed` and `--trace` of the command line."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="name each file before it is read, on stderr")
    return parser.parse_args()


def run(files: Iterable[Damaged], read: Callable[[str, str, bytes], Outcome], *, trace: bool) -> int:
    """Read all files, list those that did what none may, and print the table; 1 where there is any."""
    faulthandler.enable()
    outcomes = []
    for number, (name, mutation, data) in enumerate(files):
        if trace:
            print(number, name, mutation, file=sys.stderr, flush=True)
        outcomes.append(read(name, mutation, data))
        if outcomes[-1].bad:
            print("BAD", number, name, outcomes[-1], flush=True)
    _print(outcomes)
    return int(any(one.bad for one in outcomes))


def _print(outcomes: list[Outcome]) -> None:
    errors = ["refused", "damaged"]
    kinds = sorted({one.result for one in outcomes if not one.result.startswith("!")} - set(errors)) + errors
    print("| files | mutation | " + " | ".join(kinds) + " | other | slowest s | most MiB |")
    print("|---|---" + "|---:" * (len(kinds) + 3) + "|")
    for key in sorted({(one.kind, one.mutation) for one in outcomes}):
        group = [one for one in outcomes if (one.kind, one.mutation) == key]
        counts = collections.Counter(one.result for one in group)
        other = len(group) - sum(counts[kind] for kind in kinds)
        row = [*key, *(counts[kind] for kind in kinds), other]
        row += [f"{max(one.seconds for one in group):.2f}", f"{max(one.megabytes for one in group):.0f}"]
        print("| " + " | ".join(map(str, row)) + " |")
    total = collections.Counter(one.result for one in outcomes)
    print(f"{len(outcomes)} files: " + ", ".join(f"{total[kind]} {kind}" for kind in kinds))
