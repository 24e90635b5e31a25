"""Options of `run_batch`, in three groups: the work, the overlays, and privacy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from camscope.errors import InputError
from camscope.explainers.core.evaluation_context import check_positive_integer

DEFAULT_CHUNK_SIZE = 256  # images per part
Engine = Literal["local", "ray"]
PrivacyProfile = Literal["research", "clinical"]


@dataclass(frozen=True)
class BatchOptions:
    """How a run divides, reads and distributes its work.

    Attributes:
        chunk_size: Images per part file. A process that is killed loses at most this many images.
        shard: (i, n): this process computes every n-th part, starting with part i.
        max_failures: End the run with a RunError when more images than this have failed. None: no limit.
        reduced_decoding: Decode a large JPEG at 1/2, 1/4 or 1/8 of its size, but at no less than four times the size that
            the preprocessing resizes it to. Five times as fast for 8 megapixels; the ranks of the maps correlate at 0.994
            or more.
        window: The display window of scans: see `read_scan`.
        engine: "local" works in this process. "ray" works in `num_workers` processes of a Ray cluster. The rows are the
            same, and each engine resumes what the other began.
        address: HOST:PORT of the Ray cluster. None: the Ray instance of this machine, started if there is none.
        num_workers: Processes of Ray, each with a copy of the model. None: one per GPU (model on CUDA) or per CPU.

    >>> BatchOptions(chunk_size=64, shard=(0, 8)).chunk_size
    64

    """

    chunk_size: int = DEFAULT_CHUNK_SIZE
    shard: tuple[int, int] = (0, 1)
    max_failures: int | None = None
    reduced_decoding: bool = False
    window: Any = None
    engine: Engine = "local"
    address: str | None = None
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("local", "ray"):
            raise InputError(f"engine={self.engine!r}: expected 'local' or 'ray'")
        if self.engine == "local" and (self.address is not None or self.num_workers is not None):
            raise InputError("address and num_workers are options of Ray: pass engine='ray' too, or leave them out")
        check_positive_integer(None, chunk_size=self.chunk_size, num_workers=self.num_workers)


@dataclass(frozen=True)
class OverlayOptions:
    """How a run draws its maps on their images.

    Attributes:
        format: "jpg", "png" or "webp".
        height: Height of an overlay in pixels. None: the height of the image.

    >>> OverlayOptions("png", height=512).format
    'png'

    """

    format: str = "jpg"
    height: int | None = None


@dataclass(frozen=True)
class PrivacyOptions:
    """What a run may write about files and patients.

    Attributes:
        profile: "research" writes no file name, and of the manifest only the columns `target`, `id` and `keep_columns`.
            "clinical" writes all of them. None: "research" for a run with medical images, "clinical" for all others.
        keep_columns: Further columns of the manifest that the profile "research" writes.
        allow_burned_in_text: Draw overlays on scans even if text may be burned into them.

    >>> PrivacyOptions(profile="research", keep_columns=["site"]).profile
    'research'

    """

    profile: PrivacyProfile | None = None
    keep_columns: Sequence[str] = ()
    allow_burned_in_text: bool = False

    def __post_init__(self) -> None:
        if self.profile not in (None, "research", "clinical"):
            raise InputError(f"profile={self.profile!r}: expected 'research' or 'clinical'")


DEFAULT_BATCH_OPTIONS, DEFAULT_PRIVACY_OPTIONS = BatchOptions(), PrivacyOptions()
