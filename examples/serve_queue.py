"""Explain jobs from a queue
=========================

Two threads share one explainer and take files from a queue. A full queue makes the producer wait, so memory has a bound. A bad
file is a result with a message.

**This page is not executed** when the documentation is built, since it needs a folder of images:

.. code-block:: bash

   python examples/serve_queue.py FOLDER_OF_IMAGES maps

The worker needs only `get` and `put`. A client of a message broker takes the place of the two queues.
"""

# %%
# The worker
# ----------

import sys
import threading
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from camscope import Explainer, GradCAM, load_model
from camscope.images.photo_reader import read_photo

MAX_QUEUED, N_THREADS, MAX_PIXELS = 8, 2, 25_000_000


class Result(NamedTuple):
    """The status of one job. `message` is the error, or an empty text."""

    name: str
    status: str
    message: str


def work(explainer: Explainer, jobs: "Queue[Path | None]", results: "Queue[Result]", folder: Path) -> None:
    """Explain files until None arrives. A bad file does not end the worker."""
    while (path := jobs.get()) is not None:
        try:
            photo = read_photo(path, max_pixels=MAX_PIXELS)
            explanation = explainer.explain(photo.pixels)
            explanation.save(folder / f"{path.name}.png")
            results.put(Result(path.name, explanation.status, ""))
        except Exception as error:  # a worker that ends would leave the producer waiting
            results.put(Result(path.name, "error", str(error) or type(error).__name__))


# %%
# The producer
# ------------


def main(source: Path, folder: Path) -> list[Result]:
    """Explain all files of a folder, and return one result for each."""
    folder.mkdir(parents=True, exist_ok=True)
    explainer = GradCAM(load_model("phantom"), "layer4")
    jobs: Queue[Path | None] = Queue(MAX_QUEUED)
    results: Queue[Result] = Queue()
    threads = [threading.Thread(target=work, args=(explainer, jobs, results, folder)) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for path in sorted(path for path in source.iterdir() if path.is_file()):
        jobs.put(path)
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join()
    finished = sorted(results.get() for _ in range(results.qsize()))
    for result in finished:
        print(*result, sep="  ")
    return finished


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
