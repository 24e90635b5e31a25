"""Install a built wheel in a fresh environment outside the checkout, and run `camscope demo` and a test of each extra there.

python tests/release/try_wheel.py dist
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_FOR_USERS = ("test", "docs", "dev", "release", "gallery")
EXTRAS = tuple(extra for extra in PROJECT["optional-dependencies"] if extra not in NOT_FOR_USERS)
REQUIRED_IN_SDIST = (
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "CITATION.cff",
    "docs/index.md",
    "tests/conftest.py",
    "Makefile",
)
REQUIRED_IN_WHEEL = ("camscope/py.typed", "camscope/cli/__init__.py", "camscope/batch/contact_sheet.html")


def main() -> None:
    """Check the wheel and the sdist in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--extras", nargs="*", default=EXTRAS, help="only these extras")
    arguments = parser.parse_args()
    (wheel,), (sdist,) = arguments.folder.glob("*.whl"), arguments.folder.glob("*.tar.gz")
    check_content(wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        try_in_fresh_environment(wheel.resolve(), Path(folder), arguments.extras)


def check_content(wheel: Path, sdist: Path) -> None:
    """Check the metadata and the files of both archives."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = HeaderParser().parsestr(
            archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        )
    assert not [name for name in REQUIRED_IN_WHEEL if name not in names], names[:20]
    assert not [name for name in names if not name.startswith(("camscope/", "camscope-"))]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{metadata['Version']}]" in changelog, f"the changelog has no version {metadata['Version']}"
    assert metadata["License-Expression"] == PROJECT["license"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in REQUIRED_IN_SDIST if name not in inside]
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; {sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB")


def try_in_fresh_environment(wheel: Path, folder: Path, extras: tuple[str, ...]) -> None:
    """Install the wheel alone and run the demo; then add one extra after the other, each with its test."""
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> None:
        print("+", *command[1:], flush=True)
        subprocess.run([str(part) for part in command], check=True, cwd=folder, env=clean)

    run(python, "-m", "pip", "install", "--quiet", wheel)
    run(python.with_name("camscope"), "demo", "-o", "demo")
    run(python.with_name("camscope"), "info")
    shutil.copy(Path(__file__).with_name("extras_of_wheel.py"), folder / "test_extras.py")
    shutil.copy(Path(__file__).parents[1] / "onnx_files.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    run(python, "-m", "pip", "install", "--quiet", "pytest")
    for extra in extras:
        run(python, "-m", "pip", "install", "--quiet", f"camscope[{extra}] @ {wheel.as_uri()}")
        run(python, "-m", "pytest", "-q", "test_extras.py", "-k", f"test_{extra.replace('-', '_')}_extra")


if __name__ == "__main__":
    sys.exit(main())
