"""`python -m benchmarks.serve`: rate, memory and warnings of examples/serve_fastapi.py over 10,000 requests.

Eight threads of a test client in the same process send radiographs of 128 x 128 pixels, so the rate includes the client and no
network. One upload of a hundred is no image. Each other request issues the same warning, which has to be logged once and
counted each time. Each answer is compared with the map that `explain` computes directly. `--write` keeps the figures in
results/serve.json.
"""

import argparse
import io
import json
import logging
import os
import runpy
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.batch_memory import resident
from benchmarks.machine import machine
from camscope import Explanation, GradCAM, load_model
from camscope.errors import CamscopeWarning
from camscope.phantom import CATEGORIES, draw_radiograph

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve_fastapi.py"
RESULTS = Path(__file__).parent / "results" / "serve.json"
N_REQUESTS, N_THREADS, N_IMAGES, BAD_EVERY = 10_000, 8, 8, 100
PLANTED_WARNING = "a warning of each request"


class WarningExplainer:
    """Grad-CAM of the bundled model, with the same warning at each call."""

    def __init__(self) -> None:
        self.explainer = GradCAM(load_model("phantom"), "layer4")

    def explain(self, pixels: NDArray[np.uint8], target: str | int | None) -> Explanation:
        """Warn, then explain."""
        warnings.warn(PLANTED_WARNING, CamscopeWarning, stacklevel=2)
        return self.explainer.explain(pixels, target)


class RecordCounter(logging.Handler):
    """Counts the lines of a log by their text."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count one line."""
        self.counts[record.getMessage()] += 1


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return the bytes of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def compute_direct_maps(uploads: list[bytes], targets: list[str]) -> dict[tuple[int, str], bytes]:
    """Explain each upload for each target without a server, in one thread. Return the pixels of the overlays."""
    explainer = GradCAM(load_model("phantom"), "layer4")
    images = [np.asarray(Image.open(io.BytesIO(upload)).convert("RGB")) for upload in uploads]
    return {
        (i, target): explainer.explain(image, target).annotated_image().tobytes()
        for i, image in enumerate(images)
        for target in targets
    }


def measure(
    n_requests: int = N_REQUESTS, n_threads: int = N_THREADS, print_progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Send the requests in ten parts.

    Returns:
        Requests per second, MB of the process after each part, and counts of statuses, equal maps, warnings and lines of the log.

    """
    from fastapi.testclient import TestClient

    uploads = [encode_png(draw_radiograph(seed, CATEGORIES[seed % len(CATEGORIES)]).image) for seed in range(N_IMAGES)]
    targets = list(CATEGORIES)
    direct = compute_direct_maps(uploads, targets)
    log = RecordCounter()
    logging.getLogger("camscope").addHandler(log)
    statuses: Counter[int] = Counter()
    n_equal, memory_mb, part_seconds = 0, [], []

    def send(n: int) -> tuple[int, bool]:
        image, target = n % N_IMAGES, targets[n // N_IMAGES % len(targets)]
        data = b"no image" if n % BAD_EVERY == 0 else uploads[image]
        answer = client.post("/explain", content=data, params={"target": target})
        if answer.status_code != 200:
            return answer.status_code, False
        overlay = np.asarray(Image.open(io.BytesIO(answer.content))).tobytes()
        return answer.status_code, overlay == direct[image, target]

    app = runpy.run_path(str(EXAMPLE))["create_app"](WarningExplainer)
    try:
        with TestClient(app) as client, ThreadPoolExecutor(n_threads) as pool:
            for part in np.array_split(np.arange(n_requests), 10):
                begin = time.perf_counter()
                for status, is_equal in pool.map(send, part.tolist()):
                    statuses[status] += 1
                    n_equal += is_equal
                part_seconds.append(time.perf_counter() - begin)
                memory_mb.append(round(resident(os.getpid())[0], 1))
                print_progress(f"{sum(statuses.values())} requests, {part_seconds[-1]:.1f} s, {memory_mb[-1]} MB")
            warning_counts = client.get("/warnings").json()
    finally:
        logging.getLogger("camscope").removeHandler(log)
    return {
        "requests": n_requests,
        "threads": n_threads,
        "seconds": round(sum(part_seconds), 1),
        "requests_per_second": round(n_requests / sum(part_seconds), 1),
        "memory_mb": memory_mb,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "equal_maps": n_equal,
        "warnings": warning_counts,
        "log_lines": dict(log.counts),
    }


def main() -> None:
    """Run the command line of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=N_REQUESTS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = {
        "machine": machine("cpu"),
        **measure(options.requests, print_progress=lambda text: print(text, flush=True)),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if options.write:
        RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
