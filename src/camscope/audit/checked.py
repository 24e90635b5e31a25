"""Checked: one thing of an audit that was looked at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Checked:
    """Whether it is as it was, and in words what was looked at, or what is wrong. `name`: a file, or what is in several."""

    name: str
    holds: bool
    said: str

    @classmethod
    def of(cls, name: str, right: str, wrong: "list[str]") -> "Checked":
        """It holds where nothing is wrong; else the first things that are."""
        more = f", and {len(wrong) - FEW} more" if len(wrong) > FEW else ""
        return cls(name, not wrong, "; ".join(wrong[:FEW]) + more if wrong else right)


FEW = 3  # things that are wrong, in words
