"""Files that may be packed by gzip, unpacked no further than they are read, and read no further than is said."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from camscope.errors import ImageError
from camscope.wording import plural

GZIP = b"\x1f\x8b"
MAX_SKIP = 2**33  # bytes before the volume that is wanted
MAX_REST = 2**26  # bytes after it that are unpacked for the checksum


@contextmanager
def unpacked(file: BinaryIO) -> Iterator[BinaryIO]:
    """The file itself, or what is in it, unpacked no further than it is read."""
    packed = file.read(2) == GZIP
    file.seek(0)
    if not packed:
        yield file
        return
    with gzip.GzipFile(fileobj=file) as stream:
        yield cast(BinaryIO, stream)


def passed(stream: BinaryIO, skip: int, name: str) -> None:
    """On by so many bytes; a packed file cannot be entered in its middle."""
    if skip > MAX_SKIP:
        raise ImageError(f"{name}: its voxels begin {plural(skip, 'byte')} into the file; the limit is {MAX_SKIP}")
    while skip > 0:
        if not (read := len(stream.read(min(skip, 1 << 20)))):
            raise ImageError(f"{name}: the file ends before its voxels")
        skip -= read


def to_the_end(stream: BinaryIO) -> None:
    """Of a packed file, so that its checksum is compared; not of one in which much more follows."""
    left = MAX_REST
    while left > 0 and (read := len(stream.read(min(left, 1 << 20)))):
        left -= read


def exactly(stream: BinaryIO, size: int, name: str) -> bytes:
    """So many bytes, read piece by piece: room is made for what there is, not for what a header says."""
    pieces, left = [], size
    while left > 0 and (piece := stream.read(min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise ImageError(
            f"{name}: {plural(size - left, 'byte')} where the header says {size}: the file is cut off or its header lies"
        )
    return b"".join(pieces)
