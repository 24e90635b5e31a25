"""Peak memory of one Grad-CAM call above that of plain inference, in a fresh process each.

The child loads the tool, runs inference and notes the highest resident set, then runs the tool and notes it again.
On an accelerator the allocator's own peak is read instead.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import cases, peers
from benchmarks.import_time import fresh, last_line
from benchmarks.report import OURS, Figure
from benchmarks.timing import Spread

GOAL = 50
MEGABYTE = 2**20
# The C library returns a large block to the system at once: what is resident is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def figures(name: str, device: str, repeats: int) -> list[Figure]:
    """Megabytes above plain inference for each tool on one case."""
    return [_figure(name, device, tool, repeats) for tool in peers.TOOLS]


def _figure(name: str, device: str, tool: str, repeats: int) -> Figure:
    work, goal = f"{cases.RECIPES[name].title}, batch {cases.BATCH}", float(GOAL) if tool == OURS else None
    runs = []
    for _ in range(repeats):
        done = fresh("-m", "benchmarks.memory", tool, name, device, **ALLOCATOR)
        if done.returncode:
            return Figure("memory", work, tool, None, goal=goal, note=last_line(done.stderr))
        runs.append(float(done.stdout.split()[-1]))
    return Figure.of("memory", work, tool, Spread.of(runs), goal=goal)


def above_inference(tool: str, case: cases.Case) -> float:
    """Megabytes by which the tool's peak exceeds that of a forward pass, in this process."""
    with peers.open_tool(tool, case):
        pass  # what it loads is in memory from here on
    plain = peak(case.device, case.forward)
    with peers.open_tool(tool, case) as opened:
        return (peak(case.device, opened.run) - plain) / MEGABYTE


def peak(device: str, run: Callable[[], object]) -> int:
    """Bytes in use at the highest point of two calls."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")  # resets the highest resident set to the present one
    for _ in range(2):
        run()
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else _highest_resident()


def _highest_resident() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(above_inference(sys.argv[1], cases.build(sys.argv[2], sys.argv[3])))
