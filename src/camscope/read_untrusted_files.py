"""Read JSON, TOML, NumPy, zip and Parquet files from untrusted sources. Sizes are checked before values are read."""

import atexit
import json
import os
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.atomic_writes_and_folder_locks import open_regular_file, read_bytes
from camscope.errors import CamscopeError, InputError
from camscope.optional_packages import require
from camscope.plurals import plural

MAX_JSON_BYTES, MAX_TOML_BYTES = 2**28, 2**24  # bytes of a file; a run or an audit of a million images has half of it
MAX_ARRAY_BYTES = 2**32  # bytes of the arrays of one .npz file
MAX_EXCESS_VALUES, MAX_VALUES_PER_BYTE = 2**24, 64  # of a column of a Parquet file; a damaged file may claim more
CHECKSUM_MISMATCH = "the data does not have the checksum"
MAX_ERROR_CHARACTERS = 200  # of the quoted text of a foreign error


@contextmanager
def read_errors_converted(
    message: str,
    error_type: Callable[[str], CamscopeError] = InputError,
    *,
    quote_original: bool = True,
    wrap_camscope_errors: bool = False,
) -> Iterator[None]:
    """Convert any exception inside the `with` to an error of one type. The text of the new error begins with `message`.

    `quote_original` includes the text of another library's error, which may name a patient. Errors of camscope already
    name the file, and are converted only with `wrap_camscope_errors`.
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
    """Read a JSON file. If this fails, raise an InputError that begins with `message`."""
    with read_errors_converted(message or f"{path} is no JSON file that can be read"):
        return json.loads(read_bytes(path, max_bytes))


def read_toml(path: str | os.PathLike[str], message: str | None = None) -> dict[str, Any]:
    """Read a TOML file. If this fails, raise an InputError that begins with `message`."""
    with read_errors_converted(message or f"{path}: this is no TOML file"):
        return tomllib.loads(read_bytes(path, MAX_TOML_BYTES).decode("utf-8"))


def parse_toml(text: str, message: str) -> dict[str, Any]:
    """Parse TOML text. For invalid text, raise an InputError that begins with `message`."""
    with read_errors_converted(message):
        return tomllib.loads(text)


def read_npz(
    path: str | os.PathLike[str], max_bytes_by_name: Mapping[str, int], max_bytes: int = MAX_ARRAY_BYTES
) -> dict[str, NDArray[Any]]:
    """Read the named arrays of a .npz file without unpickling. Leave out names that the file does not contain.

    `max_bytes_by_name` limits the size of each array, and `max_bytes` that of all arrays together.
    """
    with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
        members = {name: f"{name}.npy" for name in max_bytes_by_name if f"{name}.npy" in archive.namelist()}
        declared = {name: _read_declared_byte_count(archive, member) for name, member in members.items()}
        if (total := sum(declared.values())) > max_bytes:
            raise InputError(f"the arrays have {plural(total, 'byte', spec=',')}, more than the limit of {max_bytes:,}")
        for name, n_bytes in declared.items():
            if n_bytes > max_bytes_by_name[name]:
                raise InputError(
                    f"the array {name} has {plural(n_bytes, 'byte', spec=',')}, more than the limit of "
                    f"{max_bytes_by_name[name]:,}"
                )
        arrays = {}
        for name, member in members.items():
            with archive.open(member) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return arrays


def _read_declared_byte_count(archive: zipfile.ZipFile, member: str) -> int:
    """Return how many bytes an array in a .npz file declares. Raise an InputError if the zip archive stores another number."""
    size = archive.getinfo(member).file_size
    readers: dict[Any, Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with archive.open(member) as stream:
        shape, _, dtype = readers[np.lib.format.read_magic(stream)](stream)
        start = stream.tell()
    if dtype.hasobject or any(side < 0 for side in shape):
        raise InputError(f"an array has the type {dtype} and the shape {shape}; expected an array of numbers")
    declared = int(np.prod([int(side) for side in shape], dtype=object)) * int(dtype.itemsize)
    if declared + start != size:
        raise InputError(
            f"{member} declares {plural(declared, 'byte', spec=',')} of values, but the archive holds {size - start:,}"
        )
    return declared


def check_zip_sizes_and_checksums(path: str | os.PathLike[str]) -> None:
    """Raise an InputError for a zip archive that unpacks to more bytes than its own size, and for a wrong checksum.

    An archive without checksums, which `torch.save` can write, has zeros in their place. They are not compared.
    """
    size = Path(path).stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        declared = sum(member.file_size for member in members)
        if declared > size:
            raise InputError(
                f"it has {plural(size, 'byte', spec=',')} and would unpack to {declared:,}; expected uncompressed tensors"
            )
        if any(member.CRC for member in members) and (damaged := archive.testzip()) is not None:
            raise InputError(f"{CHECKSUM_MISMATCH} of {damaged}")


def read_parquet(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Any:
    """Read a Parquet file as a PyArrow table. If this fails, raise an InputError that does not quote any cell."""
    parquet: Any = import_module("pyarrow.parquet")
    with read_errors_converted(f"{path}: this is no Parquet table", quote_original=False):
        check_parquet_files([path])
        table = parquet.read_table(path, columns=None if columns is None else list(columns))
        table.validate(full=True)  # texts that are not UTF-8, lists that end before they start
        return table


@cache
def _open_footer_database(process: int) -> Any:
    """Open an empty DuckDB database. Each process opens only one."""
    return require("duckdb", extra="batch").connect(config={"autoinstall_known_extensions": "false"})


atexit.register(_open_footer_database.cache_clear)  # DuckDB reports a connection that is open at the end as a leak


def check_parquet_files(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Raise an InputError for a damaged Parquet file, and for a file that declares more values than fit into its bytes."""
    duckdb = require("duckdb", extra="batch")  # it reads only the footers; PyArrow 26 crashes on a damaged one
    database = _open_footer_database(os.getpid())
    names = [re.sub(r"([*?[])", r"[\1]", os.fspath(path)) for path in paths]  # these characters would be a pattern
    with database.cursor() as connection:  # one per thread
        try:
            claims = connection.execute(PARQUET_FOOTER_QUERY, [names]).fetchall()
        except duckdb.Error as error:
            if len(paths) > 1:  # find the damaged one
                for path in paths:
                    check_parquet_files([path])
            raise InputError(f"{paths[0]}: it is not a Parquet file, or it is damaged") from error
    for name, too_few, n_excess, n_bytes in claims:
        if too_few or n_excess > MAX_EXCESS_VALUES or n_bytes > Path(name).stat().st_size:
            raise InputError(
                f"{name}: a column claims more values than its bytes hold; the file is damaged or malicious"
            )


PARQUET_FOOTER_QUERY = f"""
SELECT file_name, bool_or(num_values < row_group_num_rows), max(num_values - {MAX_VALUES_PER_BYTE} * total_compressed_size),
       sum(total_compressed_size)
FROM parquet_metadata(?) GROUP BY file_name
"""  # noqa: S608 - only our own numbers are inserted
