"""`python -m benchmarks.batch_memory`: the most memory that a run over a few very large images holds.

Twelve PNGs of 9,900 x 9,900 pixels (294 MB each, decoded) through `camscope batch` with overlays, in a process of its own; with
`--threads` and `--reduced` as that takes them. The goal is 1.5 GB. `--json FILE` keeps the figures.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.machine import machine

IMAGES, SIDE, GOAL = 12, 9900, 1500.0
INTERVAL = 0.02  # seconds between two looks


def written(folder: Path, images: int, side: int) -> None:
    """PNGs with structure and noise: they are no easier to decode than photographs."""
    drawn = np.random.default_rng(0)
    folder.mkdir()
    tile = drawn.integers(0, 256, (side // 9, side // 9, 3), dtype=np.uint8)
    for n in range(images):
        pixels = np.tile(np.roll(tile, n * 37, 0), (9, 9, 1))
        Image.fromarray(pixels).save(folder / f"{n:02d}.png", compress_level=1)


def resident(pid: int) -> tuple[float, float]:
    """MB of a process that are in memory now, and at its highest point."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return int(found.get("VmRSS", 0)) * 1024 / 1e6, int(found.get("VmHWM", 0)) * 1024 / 1e6


def measured(folder: Path, more: Sequence[str]) -> dict[str, Any]:
    """One run: its exit code, seconds, the peak of its process, and how many maps and overlays it made."""
    words = ["batch", str(folder / "images"), "-o", str(folder / "run"), "--overlays", "jpg", "--overwrite", *more]
    begin, peak, high = time.perf_counter(), 0.0, 0.0
    process = subprocess.Popen([sys.executable, "-m", "camscope", *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        now, highest = resident(process.pid)
        peak, high = max(peak, now), max(high, highest)
        time.sleep(INTERVAL)
    return {
        "arguments": list(more),
        "exit": process.returncode,
        "seconds": round(time.perf_counter() - begin, 1),
        "peak_mb": round(max(peak, high), 1),
        "goal_mb": GOAL,
        "overlays": len(list((folder / "run" / "overlays").rglob("*.jpg"))),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 above the goal, or where an image has no overlay."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--threads", type=int, nargs="*", default=[], help="several numbers are several runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    runs = []
    with TemporaryDirectory() as place:
        written(Path(place, "images"), options.images, options.side)
        for more in [[], *(["--threads", str(count)] for count in options.threads)]:
            runs.append(measured(Path(place), more))
            print(json.dumps(runs[-1]), flush=True)
    if options.json:
        facts = {"machine": machine("cpu"), "images": options.images, "side": options.side, "runs": runs}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return int(any(run["exit"] != 0 or run["peak_mb"] > GOAL or run["overlays"] != options.images for run in runs))


if __name__ == "__main__":
    sys.exit(main())
