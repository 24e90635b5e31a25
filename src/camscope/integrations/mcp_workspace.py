"""`Workspace`: what an MCP server may use. It resolves names and paths of a call, and keeps paths and patients out of replies."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from camscope.batch import BatchRun
from camscope.batch.path_resolver import PathResolver, is_url
from camscope.errors import CamscopeError, ImageError, InputError, OutputError
from camscope.explainers import Explainer
from camscope.explainers.comparison.grid_of_targets_and_methods import create_explainers_at_layers
from camscope.explainers.core.model_input import accepts_scans
from camscope.explainers.core.redacted_settings_text import redact_parameters
from camscope.explanation import Explanation
from camscope.images.files.find_and_open_image_files import PHOTO_SUFFIXES, is_scan_name
from camscope.images.files.redacted_errors_and_file_pseudonyms import (
    format_error_without_causes,
    pseudonymize_source,
    suppress_library_output,
)
from camscope.images.scans.scan_reader import is_scan
from camscope.registry import METHODS

MAX_IMAGE_PIXELS = 2**26  # of a photo, before it is decoded: 8192 x 8192
MAX_IMAGE_BYTES = 2**29
MAX_METHODS_PER_CALL = 12
OUTPUT_SUFFIXES = (".png", ".npz")
ABSOLUTE_FOLDERS = re.compile(r"(?<![\w/:.])(?:[A-Za-z]:)?(?:[/\\][^/\\\s'\",;:]+)+[/\\]")


class SourceImage(NamedTuple):
    """An image below a root, and the name that replies may contain. `is_private` is true for medical scans."""

    path: Path
    display_name: str
    is_private: bool


@dataclass(frozen=True)
class Workspace:
    """The models, folders, runs and audits that a server was started with. A call can use nothing else.

    Attributes:
        models: The loaded models by name. The first one is the default.
        roots: The folders of images and masks.
        runs: Runs of `run_batch` by name.
        audits: Finished audits by name.
        layer: The default layer. Default: that of each method.
        preprocess: The preprocessing of models that define none.
        allow_writing: Whether a call may write new files below the roots.

    Raises:
        InputError: There is no model, a root is no folder, or a run contains names of scans.

    >>> from camscope import load_model
    >>> Workspace({"phantom": load_model("phantom")}, [image_folder]).get_model(None)[0]  # `image_folder`: a folder
    'phantom'

    """

    models: Mapping[str, nn.Module]
    roots: Sequence[Path]
    runs: Mapping[str, BatchRun] = field(default_factory=dict)
    audits: Mapping[str, Any] = field(default_factory=dict)
    layer: str | None = None
    preprocess: str | None = None
    allow_writing: bool = False

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError("the server has no model; name one with --model")
        for root in map(Path, self.roots):
            if not root.is_dir():
                raise InputError(f"{root} is not a folder; name an existing folder with --root")
        for name, run in self.runs.items():
            check_run_hides_scans(name, run)

    @property
    def _resolvers(self) -> list[PathResolver]:
        return [PathResolver(Path(root).resolve(), confined=True, fetch=False) for root in self.roots]

    def get_model(self, name: str | None) -> tuple[str, nn.Module]:
        """Return the name and the module of a model. Without a name, return the first model."""
        chosen = next(iter(self.models)) if name is None else name
        return chosen, _look_up(self.models, chosen, "model", "--model")

    def get_run(self, name: str) -> BatchRun:
        """Return a run by its name."""
        run: BatchRun = _look_up(self.runs, name, "run", "--run")
        return run

    def get_audit(self, name: str) -> Any:
        """Return an audit by its name."""
        return _look_up(self.audits, name, "audit", "--audit")

    def build_explainers(self, model: nn.Module, methods: Sequence[str], layer: str | None) -> list[Explainer]:
        """Create one explainer for each method."""
        if not 1 <= len(methods) <= MAX_METHODS_PER_CALL:
            raise InputError(f"{len(methods)} methods; expected 1 to {MAX_METHODS_PER_CALL}; name fewer")
        chosen_layer = layer or self.layer
        layers = None if chosen_layer is None else [chosen_layer]
        explainers: list[Explainer] = []
        for name in dict.fromkeys(methods):
            explainers += create_explainers_at_layers(
                METHODS.find(name), model, layers, {"preprocess": self.preprocess}
            )
        return explainers

    def is_below_root(self, path: str) -> bool:
        """Return whether a path, with all symlinks followed, lies below a root. A URL never does."""
        return bool(path) and "\0" not in path and not is_url(path) and any(r.is_allowed(path) for r in self._resolvers)

    def resolve_path(self, path: str, what: str = "image") -> Path:
        """Return the real path of an existing file or folder below a root. `what` names it in messages."""
        if not self.is_below_root(path):
            raise InputError(
                f"the path of the {what} is outside of the folders of this server; name a path below one of them: "
                f"{self.format_roots()}"
            )
        candidates = [Path(r.resolve(path)) for r in self._resolvers if r.is_allowed(path)]
        existing = next((candidate for candidate in candidates if candidate.exists()), None)
        if existing is None:
            raise InputError(f"there is no such {what} below the folders of this server; check its path")
        return existing.resolve()

    def resolve_image(self, path: str) -> SourceImage:
        """Return an image below a root. A photo with too many bytes or pixels is rejected before it is decoded."""
        file = self.resolve_path(path)
        if not file.is_file():
            raise ImageError("the path is not a file; name one image")
        if file.stat().st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"the image has more than {MAX_IMAGE_BYTES:,} bytes, the limit; use a smaller file")
        if is_scan_name(file.name) or is_scan(file):
            return SourceImage(file, pseudonymize_source(file), True)
        check_pixel_count(file)
        return SourceImage(file, self.display_path(file), False)

    def resolve_output(self, path: str) -> Path:
        """Return the path of a new file below a root."""
        if not self.allow_writing:
            raise OutputError("the server is read-only; omit save, or start the server with --allow-writing")
        if Path(path).suffix.lower() not in OUTPUT_SUFFIXES:
            raise OutputError(f"save needs a file ending in {' or '.join(OUTPUT_SUFFIXES)}; change its name")
        file = self._find_output_folder(path) / Path(path).name
        if file.exists() or file.is_symlink():
            raise OutputError("the file to save exists, and files are never replaced; choose another name")
        return file

    def _find_output_folder(self, path: str) -> Path:
        """Return the existing folder of a new file: a root, or a folder below one."""
        parent = Path(path).parent
        for root in () if "\0" in path else self.roots:
            folder = Path(root).resolve()
            if (folder / parent).resolve() == folder:
                return folder
        return self.resolve_path(path if "\0" in path else str(parent), "output folder")

    def display_path(self, path: Path) -> str:
        """Return a path relative to its root, with forward slashes."""
        for root in map(Path, self.roots):
            if path.is_relative_to(root.resolve()):
                return path.relative_to(root.resolve()).as_posix()
        return path.name

    def format_roots(self) -> str:
        """Return the names of the roots, without the folders above them."""
        return ", ".join(Path(root).resolve().name for root in self.roots) or "none; start the server with --root"

    def hide_private_names(self, image: SourceImage, explainers: Sequence[Explainer]) -> SourceImage:
        """Return the image with a pseudonym if the preprocessing of an explainer reads scans."""
        if image.is_private or not any(accepts_scans(explainer.preprocess) for explainer in explainers):
            return image
        return SourceImage(image.path, pseudonymize_source(image.path), True)

    def redact_text(self, text: str, image: SourceImage | None = None) -> str:
        """Return one line of text without names of a private image, and without folders of absolute paths."""
        if image is not None:
            text = text.replace(str(image.path), image.display_name)
            if image.is_private:
                text = re.sub(rf"(?<!\w){re.escape(image.path.name)}(?!\w)", image.display_name, text)
        for root in map(Path, self.roots):
            text = text.replace(f"{root.resolve()}/", "").replace(f"{root}/", "")
        return ABSOLUTE_FOLDERS.sub("…/", " ".join(text.split()))[:600]

    def format_error(self, error: Exception, image: SourceImage | None = None) -> str:
        """Format an error as one line. For a private image, the messages of other libraries are left out."""
        if not isinstance(error, CamscopeError):
            return f"the call failed with {type(error).__name__}; the reason is not shown, since it may contain names"
        is_private = image is not None and image.is_private
        return self.redact_text(format_error_without_causes(error) if is_private else str(error), image)


def redact_explanation(explanation: Explanation, image: SourceImage) -> Explanation:
    """Return a copy of an explanation without the path of its image."""
    parameters = redact_parameters(explanation.parameters) if image.is_private else explanation.parameters
    return replace(explanation, name=image.display_name, parameters=parameters)


def check_pixel_count(file: Path) -> None:
    """Raise an ImageError if the header of a photo claims too many pixels, or is no header of an image."""
    from PIL import Image

    try:
        with suppress_library_output(), Image.open(file) as image:
            n_pixels = image.size[0] * image.size[1]
    except Image.DecompressionBombError:
        n_pixels = MAX_IMAGE_PIXELS + 1
    except Exception:  # a decoder may raise anything
        raise ImageError("the file is not an image that can be read; name an image file") from None
    if n_pixels > MAX_IMAGE_PIXELS:
        raise ImageError(f"the image has more than {MAX_IMAGE_PIXELS:,} pixels, the limit; scale it down")


def check_run_hides_scans(name: str, run: BatchRun) -> None:
    """Raise an InputError if a run contains file names of medical scans."""
    if run.is_pseudonymized:
        return
    paths = run.table(["path"])["path"].unique().to_pylist()
    if any(path is not None and not is_url(path) and not path.lower().endswith(PHOTO_SUFFIXES) for path in paths):
        raise InputError(
            f"the run {name} contains file names of scans, which may name patients; make it with --profile research"
        )


def _look_up(values: Mapping[str, Any], name: str, what: str, option: str) -> Any:
    if name not in values:
        choices = ", ".join(values) or "none"
        raise InputError(
            f"the server was not started with this {what}; choose from: {choices}; or add it with {option}"
        )
    return values[name]
