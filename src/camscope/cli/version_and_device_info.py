"""`camscope info`: print the versions of packages, the installed extras and the devices, for a bug report."""

import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from camscope.cli import console_output, json_output, shared_options

EXAMPLE = "camscope info --json"
PACKAGES = ("torch", "torchvision", "numpy", "opencv-python-headless", "pillow", "pyarrow", "duckdb", "typer")
DEVELOPMENT_EXTRAS = ("dev", "test", "docs", "release", "bench", "gallery")


def run(
    as_json: shared_options.JsonOption = False,
) -> None:
    """Show package versions, installed extras and devices for a bug report."""
    facts = collect_environment()
    json_output.print_json_result("info", facts)
    table = console_output.new_table("", "")
    for title in ("versions", "devices"):
        table.add_row(console_output.styled_text((title, "bold")), "")
        for name, value in facts[title].items():
            table.add_row(name, str(value))
    table.add_row(console_output.styled_text(("extras", "bold")), "")
    for name, missing in facts["extras"].items():
        fix = f'missing: {", ".join(missing)}; pip install "camscope[{name}]"'
        table.add_row(name, fix if missing else "installed")
    console_output.stdout_console().print(table)


def collect_environment() -> dict[str, Any]:
    """Collect the versions of packages, the devices of PyTorch, and the packages that each pip extra lacks."""
    import torch

    devices = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    devices |= {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        devices["mps"] = "available"
    from camscope.version import __version__

    return {
        "versions": {
            "camscope": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _find_installed_version(name) or "not installed" for name in PACKAGES},
            "cuda": torch.version.cuda or "none",
        },
        "devices": devices,
        "extras": _find_missing_packages(),
    }


def _find_installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find_missing_packages() -> dict[str, list[str]]:
    """Return a dict from pip extra to the missing packages of this extra."""
    missing: dict[str, list[str]] = {}
    with suppress(PackageNotFoundError):
        for line in requires("camscope") or []:
            match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
            if match and match[2] not in DEVELOPMENT_EXTRAS:
                packages = missing.setdefault(match[2], [])
                if match[1] != "camscope" and _find_installed_version(match[1]) is None:
                    packages.append(match[1])
    return missing
