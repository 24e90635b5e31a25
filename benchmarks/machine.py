"""What the figures were taken on, and with which versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torchvision", "numpy", "grad-cam", "torchcam", "captum")


def machine(device: str) -> dict[str, str | int]:
    """Processor, cores, threads, card and versions; a package that is not installed is left out."""
    facts: dict[str, str | int] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if device.startswith("cuda"):
        facts["card"] = torch.cuda.get_device_name(device)
    return facts | {name: found for name in PACKAGES if (found := _version(name))}


def processor() -> str:
    """The processor's own name, where the system tells it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
