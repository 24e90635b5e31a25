"""`python -m benchmarks.nightly`: a run of 5,000 images without a terminal, with `--log`. Its log is read and checked.

The images are copies of 50 synthetic radiographs, and one in 250 is damaged. The result has the rate, the number of lines on
standard error, and the events of the log.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from benchmarks.machine import machine
from camscope.phantom import draw_radiograph

RESULTS = Path(__file__).parent / "results" / "nightly.json"
METHODS = "gradcam"
N_DRAWN = 50  # distinct radiographs
IMAGES_PER_DAMAGED = 250
PROGRESS_LINE = re.compile(r"\d\d:\d\d:\d\d \d+ of \d+ images?, [\d.]+ images/s, \d+ failed, \S+(?: days?, \S+)? left")


def write_images(folder: Path, n_images: int) -> int:
    """Write the images. Return how many of them are damaged."""
    folder.mkdir()
    drawn = [folder.parent / f"drawn-{n}.png" for n in range(N_DRAWN)]
    for n, path in enumerate(drawn):
        Image.fromarray(draw_radiograph(n, n % 4).image).save(path)
    n_damaged = 0
    for n in range(n_images):
        is_damaged = n % IMAGES_PER_DAMAGED == IMAGES_PER_DAMAGED // 2
        n_damaged += is_damaged
        path = folder / f"{n:05d}.png"
        if is_damaged:
            path.write_bytes(drawn[n % N_DRAWN].read_bytes()[:2000])
        else:
            shutil.copyfile(drawn[n % N_DRAWN], path)
    return n_damaged


def run_night(n_images: int) -> dict[str, Any]:
    """Explain the images in a process without a terminal. Return facts of its output and its log."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        n_damaged = write_images(folder / "images", n_images)
        command = [
            sys.executable,
            "-m",
            "camscope",
            "batch",
            "images",
            "--methods",
            METHODS,
            "-o",
            "run",
            "--log",
            "night.jsonl",
        ]
        started = time.perf_counter()
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ, check=False)
        seconds = time.perf_counter() - started
        lines = process.stderr.splitlines()
        events = [json.loads(line) for line in (folder / "night.jsonl").read_text("utf-8").splitlines()]
        end = events[-1]
        return {
            "n_images": n_images,
            "n_damaged": n_damaged,
            "methods": METHODS.split(","),
            "exit_code": process.returncode,
            "seconds": round(seconds, 1),
            "images_per_second": round(n_images / seconds, 1),
            "stderr_lines": len(lines),
            "progress_lines": sum(PROGRESS_LINE.fullmatch(line) is not None for line in lines),
            "has_escapes": "\x1b" in process.stderr + process.stdout,
            "log_lines": len(events),
            "events": dict(Counter(event["event"] for event in events)),
            "logged_exit_code": end["exit_code"],
            "logged_done": end["done"],
            "logged_failures": end["n_failures"],
            "first_progress_line": next((line for line in lines if PROGRESS_LINE.fullmatch(line)), ""),
        }


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    result = {"machine": machine("cpu"), "runs": [run_night(arguments.images)]}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["runs"], indent=1))


if __name__ == "__main__":
    main()
