"""Seconds that an import adds to `import torch`, each in a fresh process."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import OURS, Figure

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.1
HEAVY = ("cv2", "torchvision", "PIL", "matplotlib")
STATEMENTS = {
    (f"import {OURS}", OURS): f"import {OURS}",
    ("its GradCAM at hand", OURS): f"from {OURS} import GradCAM",
    ("its GradCAM at hand", "grad-cam"): "from pytorch_grad_cam import GradCAM",
    ("its GradCAM at hand", "torchcam"): "from torchcam.methods import GradCAM",
    ("its GradCAM at hand", "captum"): "from captum.attr import LayerGradCam",
}
PROGRAM = """
import sys, time
import torch
begin = time.perf_counter()
{statement}
print(time.perf_counter() - begin, *(name for name in {heavy!r} if name in sys.modules))
"""


def figures(repeats: int) -> list[Figure]:
    """The median of some fresh processes for each import."""
    return [_figure(work, tool, statement, repeats) for (work, tool), statement in STATEMENTS.items()]


def _figure(work: str, tool: str, statement: str, repeats: int) -> Figure:
    goal = GOAL if statement == f"import {OURS}" else None
    runs = []
    for _ in range(repeats):
        done = fresh("-c", PROGRAM.format(statement=statement, heavy=HEAVY))
        if done.returncode:
            return Figure("import", work, tool, None, goal=goal, note=last_line(done.stderr))
        runs.append(done.stdout.split())
    note = f"loads {', '.join(runs[0][1:])}" if runs[0][1:] else ""
    return Figure("import", work, tool, statistics.median(float(run[0]) for run in runs), goal=goal, note=note)


def fresh(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds what this one finds."""
    found = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | found | environment,
    )


def last_line(text: str) -> str:
    """The last line of a traceback, cut to a table's width."""
    lines = text.strip().splitlines() or [""]
    return lines[-1][:90]
