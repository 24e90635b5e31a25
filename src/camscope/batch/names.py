"""Names: what the files of a row are called. Row number, short hash and slug: never an id, a path or a label as it comes."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Self

from camscope.files import slug

DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Names:
    """What tells the rows of one image apart, and is therefore part of their names."""

    methods: bool = False
    settings: bool = False
    targets: bool = False

    @classmethod
    def of(cls, made_with: Mapping[str, Any]) -> Self:
        """Of a run: its `run.json` says what it was made with."""
        methods: Sequence[str] = [key.rpartition(" ")[0] for key in made_with["methods"]]
        repeated = max(Counter(methods).values(), default=1) > 1
        return cls(len(methods) > 1, repeated, len(made_with["targets"]) > 1)

    def stem(self, row: Mapping[str, Any]) -> str:
        """`00000003-1f0a92bc-cat`, and where the image has several maps `-gradcam`, `-3f2a1b00` (settings), `-nodule`."""
        mark = str(row["sha256"])
        if not DIGEST.fullmatch(mark):  # none, or not one that camscope wrote
            mark = hashlib.sha256(str(row["path"]).encode()).hexdigest()
        own = row["id"] if row["id"] != row["path"] else PurePath(row["path"]).stem
        parts = [f"{row['row']:08d}", mark[:8], slug(own)]
        parts += [_plain(row["method"])] if self.methods else []
        parts += [_plain(row["parameters"] or "none")] if self.settings else []
        parts += [_plain(row["target"] or "top")] if self.targets else []
        return "-".join(parts)


def _plain(text: str) -> str:
    """A slug that no other text has, not even where `A` and `a` name one file: of what it leaves out there is a digest."""
    short = slug(text).lower()
    return short if short == text else f"{short}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
