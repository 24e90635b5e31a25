"""Peak memory of one call of every method above that of plain inference, in a fresh process each.

The child loads the tool, runs inference and notes the highest resident set, then runs the tool and notes it again.
On an accelerator the allocator's own peak is read instead.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import cases, family, peers
from benchmarks.beside import reason
from benchmarks.import_time import fresh, last_line
from benchmarks.report import OURS, Figure
from benchmarks.timing import Spread

GOALS = {"gradcam": 50.0}
CALLS = 2  # the second one bears what the first has left on the model; a slow method is called once
MEGABYTE = 2**20
# The C library returns a large block to the system at once: what is resident is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def figures(device: str, batch: int, repeats: int, methods: list[str] | None = None) -> Iterator[list[Figure]]:
    """A row a method, on what the table of the family asks it: megabytes above plain inference, of each tool."""
    for name in methods or family.ordered():
        case = family.asked(name, device, batch)
        times = repeats if family.quick(name) else 1
        yield [_figure(tool, name, case, [device, str(batch)], times) for tool in peers.TOOLS]


def _figure(tool: str, method: str, case: cases.Case, size: list[str], repeats: int) -> Figure:
    work, goal = family.work(method, case), GOALS.get(method) if tool == OURS else None
    try:
        with peers.open_tool(tool, case, method):
            pass  # one that cannot even be opened needs no process
    except Exception as error:
        return Figure("memory", work, tool, None, goal=goal, note=reason(error))
    runs = []
    for _ in range(repeats):
        done = fresh("-m", "benchmarks.memory", tool, method, *size, **ALLOCATOR)
        if done.returncode:
            return Figure("memory", work, tool, None, goal=goal, note=last_line(done.stderr))
        runs.append(float(done.stdout.split()[-1]))
    return Figure.of("memory", work, tool, Spread.of(runs), goal=goal)


def above_inference(tool: str, case: cases.Case, method: str = "gradcam") -> float:
    """Megabytes by which the tool's peak exceeds that of a forward pass, in this process."""
    with peers.open_tool(tool, case, method):
        pass  # what it loads is in memory from here on
    plain = peak(case.device, case.forward)
    with peers.open_tool(tool, case, method) as opened:
        return (peak(case.device, opened.run, CALLS if family.quick(method) else 1) - plain) / MEGABYTE


def peak(device: str, run: Callable[[], object], calls: int = CALLS) -> int:
    """Bytes in use at the highest point of some calls."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")  # resets the highest resident set to the present one
    for _ in range(calls):
        run()
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else _highest_resident()


def _highest_resident() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(tool: str, method: str, device: str, batch: str) -> None:
    """What the child does."""
    print(above_inference(tool, family.asked(method, device, int(batch)), method))


if __name__ == "__main__":
    main(*sys.argv[1:])
