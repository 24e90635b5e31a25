"""Readers of data files from others: sizes are checked before anything is read, and every failure is one clear error."""

import atexit
import json
import os
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import CamscopeError, InputError
from camscope.optional import require
from camscope.plurals import plural
from camscope.safe_files import open_regular_file, read_bytes

MAX_JSON_BYTES, MAX_TOML_BYTES = 2**30, 2**24  # bytes of a file; the largest COCO file has half of that
MAX_ARRAY_BYTES = 2**32  # bytes of the arrays of one .npz file
MAX_EXCESS_VALUES, MAX_VALUES_PER_BYTE = 2**24, 64  # of a column of a Parquet file; a damaged file may claim more
MAX_ERROR_CHARACTERS = 200  # of the quoted text of a foreign error


@contextmanager
def read_errors_converted(
    message: str,
    error_type: Callable[[str], CamscopeError] = InputError,
    *,
    quote_original: bool = True,
    wrap_camscope_errors: bool = False,
) -> Iterator[None]:
    """Convert any exception inside to one error that begins with `message`, because readers of damaged files raise anything.

    `quote_original` includes the text of a foreign error, which may name a patient. Errors of camscope name the file
    themselves, and are converted only with `wrap_camscope_errors`.
    """
    try:
        yield
    except CamscopeError as error:
        if not wrap_camscope_errors:
            raise
        wrapped = error_type(f"{message}: {error}")
        wrapped.fix, wrapped.remedy = error.fix, error.remedy
        raise wrapped from error
    except OSError as error:
        reason = error.strerror or (str(error)[:MAX_ERROR_CHARACTERS] if quote_original else type(error).__name__)
        raise error_type(f"{message}: it cannot be read: {reason}") from error
    except RecursionError:  # its traceback has a thousand lines
        raise error_type(f"{message}: it is nested too deeply") from None
    except MemoryError:
        raise error_type(f"{message}: there is not enough memory for it") from None
    except Exception as error:
        text = f": {str(error)[:MAX_ERROR_CHARACTERS]}" if quote_original and str(error) else ""
        raise error_type(f"{message}: it is damaged, or of another kind ({type(error).__name__}{text})") from error


def read_json(path: str | os.PathLike[str], message: str | None = None, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; InputError, beginning with `message` or the path, for any other file."""
    with read_errors_converted(message or f"{path} is no JSON file that can be read"):
        return json.loads(read_bytes(path, max_bytes))


def read_toml(path: str | os.PathLike[str], message: str | None = None) -> dict[str, Any]:
    """Read a TOML file; InputError, beginning with `message` or the path, for any other file."""
    with read_errors_converted(message or f"{path}: this is no TOML file"):
        return tomllib.loads(read_bytes(path, MAX_TOML_BYTES).decode("utf-8"))


def parse_toml(text: str, message: str) -> dict[str, Any]:
    """Parse the text of a TOML file; InputError, beginning with `message`, for any other text."""
    with read_errors_converted(message):
        return tomllib.loads(text)


def read_npz(
    path: str | os.PathLike[str], names: Sequence[str], max_bytes: int = MAX_ARRAY_BYTES
) -> dict[str, NDArray[Any]]:
    """Read those of the named arrays that a .npz file holds, in all at most `max_bytes`. Nothing is unpickled."""
    with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
        members = {name: f"{name}.npy" for name in names if f"{name}.npy" in archive.namelist()}
        declared = sum(_read_declared_bytes(archive, member) for member in members.values())
        if declared > max_bytes:
            raise InputError(
                f"its arrays have {plural(declared, 'byte', spec=',')}, more than the limit of {max_bytes:,}"
            )
        arrays = {}
        for name, member in members.items():
            with archive.open(member) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return arrays


def _read_declared_bytes(archive: zipfile.ZipFile, member: str) -> int:
    """Return the bytes of an array by its header, which has to agree with the archive's directory."""
    size = archive.getinfo(member).file_size
    readers: dict[Any, Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with archive.open(member) as stream:
        shape, _, dtype = readers[np.lib.format.read_magic(stream)](stream)
        start = stream.tell()
    if dtype.hasobject or any(side < 0 for side in shape):
        raise InputError(f"an array of {dtype} with shape {shape}; expected numbers")
    declared = int(np.prod([int(side) for side in shape], dtype=object)) * int(dtype.itemsize)
    if declared + start != size:
        raise InputError(f"{member} declares {plural(declared, 'byte', spec=',')} and the archive {size - start:,}")
    return declared


def check_zip(path: str | os.PathLike[str]) -> None:
    """Raise an InputError for a zip archive that would unpack to more bytes than it has. Only its directory is read."""
    size = Path(path).stat().st_size
    with zipfile.ZipFile(path) as archive:
        declared = sum(member.file_size for member in archive.infolist())
    if declared > size:
        raise InputError(
            f"it has {plural(size, 'byte', spec=',')} and would unpack to {declared:,}; expected uncompressed tensors"
        )


def read_parquet(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Any:
    """Read a Parquet file as a PyArrow table; InputError, without any cell's text, for any other file."""
    parquet: Any = import_module("pyarrow.parquet")
    with read_errors_converted(f"{path}: this is no Parquet table", quote_original=False):
        check_parquet([path])
        table = parquet.read_table(path, columns=None if columns is None else list(columns))
        table.validate(full=True)  # texts that are not UTF-8, lists that end before they start
        return table


@cache
def _open_footer_database(process: int) -> Any:
    """Open an empty database once in each process, which takes longer than a query of a footer."""
    return require("duckdb", extra="batch").connect(config={"autoinstall_known_extensions": "false"})


atexit.register(_open_footer_database.cache_clear)  # DuckDB reports a connection that is open at the end as a leak


def check_parquet(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Raise an InputError where a column of a Parquet file claims more values than its bytes can hold."""
    duckdb = require("duckdb", extra="batch")  # it reads only the footers; PyArrow 26 crashes on a damaged one
    database = _open_footer_database(os.getpid())
    names = [re.sub(r"([*?[])", r"[\1]", os.fspath(path)) for path in paths]  # these characters would be a pattern
    with database.cursor() as connection:  # one per thread
        try:
            claims = connection.execute(PARQUET_FOOTER_QUERY, [names]).fetchall()
        except duckdb.Error as error:
            if len(paths) > 1:  # find the damaged one
                for path in paths:
                    check_parquet([path])
            raise InputError(f"{paths[0]}: it is no Parquet file, or damaged") from error
    for name, too_few, n_excess, n_bytes in claims:
        if too_few or n_excess > MAX_EXCESS_VALUES or n_bytes > Path(name).stat().st_size:
            raise InputError(
                f"{name}: a column claims more values than its bytes hold; it is damaged, or made to fill memory"
            )


PARQUET_FOOTER_QUERY = f"""
SELECT file_name, bool_or(num_values < row_group_num_rows), max(num_values - {MAX_VALUES_PER_BYTE} * total_compressed_size),
       sum(total_compressed_size)
FROM parquet_metadata(?) GROUP BY file_name
"""  # noqa: S608 - only our own numbers are inserted
