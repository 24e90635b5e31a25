"""`python -m benchmarks.batch_scale`: memory from row 1,000 to row 100,000, and what a manifest of a million rows takes.

--rows 100000        small PNGs and a small net: images per second, and the resident memory every 10,000 rows
--manifest 1000000   planned, and resumed with all parts there but the last
"""

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn

from camscope import GradCAM
from camscope.batch import BatchOptions, BatchOutcome, build_manifest, run_batch

CHUNK, PIECE = 256, 10_000


class Small(nn.Module):
    """(N,3,32,32) -> (N,4)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layer = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of four classes."""
        scores: Tensor = self.head(self.layer(self.stem(x).relu()).relu().mean((2, 3)))
        return scores


def resident() -> float:
    """MB of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def many_rows(rows: int, folder: Path) -> None:
    """A run of so many small pictures, with the memory that it holds meanwhile."""
    images = folder / "images"
    images.mkdir()
    drawn = np.random.default_rng(0)
    for n in range(rows):
        (images / f"{n // 1000:03d}").mkdir(exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
            images / f"{n // 1000:03d}/{n:06d}.png"
        )
    tool = GradCAM(Small(), "layer", preprocess={"mean": [0.5] * 3, "std": [0.25] * 3})
    begin, at = time.perf_counter(), [1000, *range(PIECE, rows + 1, PIECE)]

    def told(outcome: BatchOutcome) -> None:
        if at and outcome.n_processed >= at[0]:
            taken = time.perf_counter() - begin
            print(
                f"row {at.pop(0):>7}: {resident():6.0f} MB resident, {outcome.n_processed / taken:.0f} images/s",
                flush=True,
            )

    run_batch(tool, images, folder / "run", options=BatchOptions(chunk_size=CHUNK), batch_size=64, on_progress=told)


def long_manifest(rows: int, folder: Path) -> None:
    """Planning: manifest, digest, ledger; and a run of which all is there but the last part."""
    path, tool = folder / "long.parquet", GradCAM(Small(), "layer", preprocess="imagenet")
    numbers = pa.array(np.arange(rows)).cast(pa.string())
    columns = {"path": pa.compute.binary_join_element_wise("images/", numbers, ".jpg", ""), "site": numbers}
    pq.write_table(pa.table(columns), path)
    before, begin = resident(), time.perf_counter()
    manifest = build_manifest(path)
    print(f"a manifest of {rows} rows: read in {time.perf_counter() - begin:.1f} s, {resident() - before:.0f} MB")
    begin = time.perf_counter()
    run_batch(
        tool, manifest, folder / "run", options=BatchOptions(chunk_size=CHUNK, shard=(rows // CHUNK, rows // CHUNK + 1))
    )
    print(f"planned, its last part of {-(-rows // CHUNK)} worked off: {time.perf_counter() - begin:.1f} s")
    parts = folder / "run" / "parts"
    made = parts / f"part-{rows // CHUNK:08d}.parquet"
    for chunk in range(rows // CHUNK):  # as that one is: images that are not there
        shutil.copyfile(made, parts / f"part-{chunk:08d}.parquet")
    made.unlink()
    begin = time.perf_counter()
    outcome = run_batch(tool, path, folder / "run", options=BatchOptions(chunk_size=CHUNK))
    print(f"resumed from the file: {time.perf_counter() - begin:.1f} s, {outcome.n_done_before} rows were there")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--manifest", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        long_manifest(options.manifest, Path(folder))
    with TemporaryDirectory() as folder:
        many_rows(options.rows, Path(folder))


if __name__ == "__main__":
    main()
