"""`python -m benchmarks.batch_kill`: 2,000 images, 100 of them bad in eight ways, by a process killed at twenty random instants.

Each time the same command is started again. The rows must be those of a run that nobody killed, byte for byte of the maps,
and every bad file must have its reason. `--engine ray`: it is a worker that is killed, and nothing is started again.
"""

import argparse
import csv
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.compute as pc
from PIL import Image

from camscope.batch import BatchRun

BAD = {
    "truncated": "it is damaged",
    "empty": "the file is empty",
    "text": "not an image of a format that Pillow knows",
    "bomb": "Pillow refuses it",
    "wrong extension": None,  # an image all the same, and read as one
    "unreadable": "it cannot be read",
    "vanished": "there is no such file",
    "animated": None,  # its first frame is read
}


def picture(drawn: np.random.Generator, kind: str) -> bytes:
    """A file of 64 x 64 pixels."""
    stream = io.BytesIO()
    Image.fromarray(drawn.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(stream, kind)
    return stream.getvalue()


def spoiled(path: Path, kind: str, drawn: np.random.Generator) -> None:
    """A bad file of one of eight kinds."""
    png = picture(drawn, "PNG")
    if kind == "unreadable":  # a permission would not keep everybody out
        path.symlink_to(path.name)
    elif kind == "animated":
        frames = [Image.new("RGB", (64, 64), color) for color in ("red", "blue")]
        frames[0].save(path, "GIF", save_all=True, append_images=frames[1:])
    elif kind != "vanished":
        bomb = bytearray(png)
        bomb[16:24] = (20_000).to_bytes(4, "big") * 2
        bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
        data = {"truncated": picture(drawn, "JPEG")[:-400], "empty": b"", "text": b"no picture", "bomb": bytes(bomb)}
        path.write_bytes(data.get(kind, png))


def made(folder: Path, images: int, share: float) -> dict[str, str]:
    """A manifest of so many images, a share of them bad; which of them is bad in which way."""
    drawn, kinds = np.random.default_rng(0), list(BAD)
    step = round(1 / share)
    bad: dict[str, str] = {}
    (folder / "images").mkdir()
    names = [f"images/{n:05d}.jpg" for n in range(images)]
    for n, name in enumerate(names):
        if n % step == step // 2:
            bad[name] = kinds[len(bad) % len(kinds)]
            spoiled(folder / name, bad[name], drawn)
        else:
            (folder / name).write_bytes(picture(drawn, "JPEG"))
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path"], *([name] for name in names)])
    return bad


def started(folder: Path, output: str, *more: str) -> "subprocess.Popen[bytes]":
    """The command, as a user gives it."""
    words = [
        "batch",
        str(folder / "list.csv"),
        "--methods",
        "gradcam,layercam",
        "-o",
        str(folder / output),
        "--chunk",
        "16",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "camscope", *words, *more], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def killed(folder: Path, output: str, times: int, chunks: int) -> list[int]:
    """How many parts there were at each kill, at a random instant of a random part."""
    instants, parts, seen = random.Random(0), folder / output / "parts", []
    for turn in range(times):
        process, goal = (
            started(folder, output),
            len(list(parts.glob("part-*"))) + instants.randint(0, 2 * chunks // (times + 4)),
        )
        if turn:
            while process.poll() is None and len(list(parts.glob("part-*"))) < goal:
                time.sleep(0.002)
        else:
            time.sleep(2)  # before anything is there
        time.sleep(instants.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.append(len(list(parts.glob("part-*"))) if parts.exists() else 0)
    return seen


def workers_killed(folder: Path, output: str, times: int, chunks: int) -> list[int]:
    """The same of Ray's workers, one at a time, while the driver goes on."""
    instants, parts, seen = random.Random(0), folder / output / "parts", list[int]()
    process = started(folder, output, "--engine", "ray", "--workers", "2", "--threads", "1")
    for turn in range(times):
        while process.poll() is None and len(list(parts.glob("part-*"))) < (turn + 1) * chunks // (times + 2):
            time.sleep(0.002)
        time.sleep(instants.random() * 0.1)
        victims = [pid for pid in _children(process.pid) if "MapWorker" in _command(pid)]
        if not victims or process.poll() is not None:
            break
        os.kill(instants.choice(victims), signal.SIGKILL)
        seen.append(len(list(parts.glob("part-*"))))
    print(f"the one start: exit code {process.wait()}")
    return seen


def _children(pid: int) -> list[int]:
    """All that descend from a process."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, kill, compare, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_kill", description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as place:
        folder = Path(place)
        bad = made(folder, options.images, 0.05)
        one_thread = ("--threads", "1")  # as a worker of Ray has: the last digits depend on it
        whole, chunks = started(folder, "whole", *one_thread), -(-options.images // 16)
        print(f"uninterrupted: exit code {whole.wait()}")
        if options.engine == "ray":
            print(f"workers killed at {workers_killed(folder, 'killed', options.times, chunks)} of {chunks} parts")
        else:
            print(f"killed at {killed(folder, 'killed', options.times, chunks)} of {chunks} parts")
            print(f"the last start: exit code {started(folder, 'killed').wait()}")
        compare(folder, bad)


def compare(folder: Path, bad: dict[str, str]) -> None:
    """Two runs row for row, and the reasons of what is bad."""
    one, other = (BatchRun(folder / name).table().drop_columns(["seconds"]) for name in ("whole", "killed"))
    print(f"{one.num_rows} rows, {other.num_rows} rows: {'equal' if one.equals(other) else 'DIFFERENT'}")
    left = list((folder / "killed" / "parts").glob(".*"))
    print(f"{len(left)} half-written files were left, and none is read")
    failed = one.filter(pc.equal(one["method"], "gradcam")).select(["path", "error", "notes"]).to_pylist()
    reasons = Counter((bad.get(row["path"], "good"), said(row).partition(":")[0]) for row in failed)
    for (kind, reason), count in sorted(reasons.items()):
        print(f"{count:5d} x {kind}: {reason}")
    for row in failed:
        expected = BAD.get(bad.get(row["path"], ""))
        if (row["error"] is None) != (expected is None) or (expected and expected not in row["error"]):
            print(f"NOT AS EXPECTED: {row}")
    shutil.rmtree(folder / "whole")


def said(row: dict[str, Any]) -> str:
    """Why there is no map, or what was odd about its file."""
    odd = [note for note in row["notes"] or () if "was chosen" not in note]
    return str(row["error"] or ", ".join(["a map", *odd]))


if __name__ == "__main__":
    main()
