"""Plausible slips in what keeps a patient's name to itself; see `mutants`."""

import io
import logging
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from camscope.batch import Manifest, build_manifest
from camscope.batch import image_manifest as runs
from camscope.errors import ImageError, InputError, PreprocessError
from camscope.explainers.core import model_input, redacted_settings_text
from camscope.images.files import redacted_errors_and_file_pseudonyms
from camscope.images.photo_reader import read_photo
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_preprocess import ScanPreprocess
from tests.mutants import Mutant
from tests.scan_files import folder, slices

HOME = (torch.device("cpu"), torch.float32)
VOLUME = np.zeros((2, 4, 4), np.int16)


def no_error_quotes_another() -> None:
    for said in ("it is damaged: DOE^JANE", "DOE^JANE, it says"):
        error = ImageError(said)
        error.__cause__ = KeyError("DOE^JANE") if "'" in said else ValueError("DOE^JANE")
        assert "DOE" not in redacted_errors_and_file_pseudonyms.format_error_without_causes(error)
        assert "it" in redacted_errors_and_file_pseudonyms.format_error_without_causes(error)


def a_folder_of_slices_is_a_scan() -> None:
    with tempfile.TemporaryDirectory() as home:
        folder(Path(home, "DOE^JANE"), slices(VOLUME, [(0, 0, 0), (0, 0, 1)]))
        Path(home, "list.csv").write_text("path\nDOE^JANE\n")
        assert runs.contains_scans(build_manifest(Path(home, "list.csv")))


def a_row_is_of_its_own_file() -> None:
    with tempfile.TemporaryDirectory() as home:
        for n in range(3):
            Path(home, f"{n}.png").write_bytes(b"%d" % n)
        Path(home, "list.csv").write_text("path\n0.png\n1.png\n2.png\n")
        manifest = build_manifest(Path(home, "list.csv"))
        some = type(manifest)(manifest.table.take([1, 2]), manifest.root)
        found = None
        with suppress(InputError):
            found = runs.ImageAccessor(some)[1]
        assert found == b"1"


class Raising(ScanPreprocess):
    def __call__(self, scan: Scan) -> tuple[Tensor, None]:
        raise KeyError("DOE^JANE")


def of_a_preprocessing_the_kind_of_error_is_told() -> None:
    with pytest.raises(PreprocessError, match="raised KeyError") as caught:
        model_input.prepare_scan(Scan(np.zeros((2, 2), np.float32), "scan-0"), Raising(), HOME)
    assert "DOE" not in str(caught.value)


def where_text_may_be_part_of_it_there_is_no_picture() -> None:
    for burned_in in (True, None):
        scan = Scan(np.zeros((2, 2), np.float32), "scan-0", has_burned_in_text=burned_in)
        item = model_input.prepare_scan(scan, ScanPreprocess(), HOME)
        assert item.image is None
        assert item.model_input_image is None


def a_debugged_decoder_tells_no_tag() -> None:
    told = io.StringIO()
    handler, logger, exif = logging.StreamHandler(told), logging.getLogger("PIL"), Image.Exif()
    level, exif[0x013B] = logger.level, "DOE^JANE"
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG", exif=exif)
    logger.addHandler(handler)
    try:
        logger.setLevel(logging.DEBUG)
        read_photo(buffer.getvalue())
        assert logger.level == logging.DEBUG
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "DOE" not in told.getvalue()


def a_path_is_no_plain_setting() -> None:
    known = redacted_settings_text.redact_parameters(
        {"baseline": "DOE^JANE.png", "n_steps": 3, "each": ["zero", "DOE/JANE.png"], "fill": "mean"}
    )
    assert "DOE" not in str(known)
    assert (known["n_steps"], known["fill"]) == (3, "mean")


QUOTED = '.replace(f": {cause}", "").replace(str(cause), "…")'
OF_PRIVACY = [
    Mutant(
        "all is told",
        redacted_errors_and_file_pseudonyms,
        "format_error_without_causes",
        QUOTED,
        "",
        no_error_quotes_another,
    ),
    Mutant(
        "only by names", runs, "contains_scans", "any(_is_scan", "any(False and _is_scan", a_folder_of_slices_is_a_scan
    ),
    Mutant(
        "rows are places",
        Manifest,
        "row_by_number",
        "int(np.searchsorted(self._row_numbers, number))",
        "number",
        a_row_is_of_its_own_file,
    ),
    Mutant(
        "the cause is told",
        model_input,
        "_apply_preprocess",
        "type(cause).__name__",
        "cause",
        of_a_preprocessing_the_kind_of_error_is_told,
    ),
    Mutant(
        "only where it says YES",
        model_input,
        "prepare_scan",
        "with_images and scan.is_safe_to_display",
        "with_images and not scan.has_burned_in_text",
        where_text_may_be_part_of_it_there_is_no_picture,
    ),
    Mutant(
        "debugged decoders",
        redacted_errors_and_file_pseudonyms,
        "suppress_library_output",
        "isEnabledFor(logging.DEBUG)",
        "isEnabledFor(-1)",
        a_debugged_decoder_tells_no_tag,
    ),
    Mutant(
        "lists of paths",
        redacted_settings_text,
        "is_number_or_word",
        "all(map(is_number_or_word, value))",
        "True",
        a_path_is_no_plain_setting,
    ),
]
