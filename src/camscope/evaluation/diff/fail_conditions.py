"""`FailCondition`: a condition of a gate, such as `top-class changed > 2 %`, and its result on counted images."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from camscope.errors import InputError
from camscope.metrics.intervals_and_p_values import compute_exact_interval
from camscope.plurals import plural

NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
ABOVE = r"(?:>|above|(?:by )?more than)"
LIMIT_PATTERN = re.compile(rf"(.*?)(?:^|\s+)(?:on\s+)?{ABOVE}\s*{NUMBER}\s*(%|percent|images?)", re.DOTALL)
OF_METHOD = r"(?: of (?P<method>[\w.+-]+))?"
CONDITION_PATTERNS = {
    "answer": r"(?:top[- ]class|answer)(?: has)? changed(?: on the same image)?",
    "status": r"status(?: has)? changed",
    "missing": r"images? missing",
    "spearman": rf"(?:map|spearman) correlation{OF_METHOD} (?:<|below) (?P<threshold>-?{NUMBER})",
    "pearson": rf"pearson correlation{OF_METHOD} (?:<|below) (?P<threshold>-?{NUMBER})",
    "share": rf"share inside (?:the )?mask{OF_METHOD} fell by {ABOVE} (?P<threshold>{NUMBER})",
}
RUN_CONDITION_EXAMPLES = (
    "top-class changed > 2 %",
    "map correlation < 0.8 on > 5 %",
    "pearson correlation < 0.8 on > 5 %",
    "share inside mask fell by > 0.1 on > 5 %",
    "status changed > 1 %",
    "images missing > 0 %",
)
PERCENT = 100.0


@dataclass(frozen=True)
class FailCondition:
    """A condition on two runs. If it holds, the gate fails.

    Attributes:
        text: The condition as the user wrote it.
        quantity: "answer", "status", "missing", "spearman", "pearson" or "share".
        threshold: The bound of a correlation, or of the fall of a share. None for other quantities.
        limit: The condition holds on more than this share (0..1) or number of images.
        is_count: Whether `limit` is a number of images.
        method: The method of the maps. Default: any method, and the map that changed most counts.

    >>> FailCondition.parse("map correlation < 0.8 on > 5 %").limit
    0.05

    """

    text: str
    quantity: str
    threshold: float | None = None
    limit: float = 0.0
    is_count: bool = False
    method: str | None = None

    @classmethod
    def parse(cls, text: str) -> "FailCondition":
        """Parse a condition. Without a limit, it holds if a single image fulfills it.

        Args:
            text: The condition, such as "top-class changed > 2 %", "status changed > 3 images" or
                "map correlation of gradcam < 0.8 on > 5 %".

        Returns:
            The condition.

        Raises:
            InputError: The text is not a condition. The message has the nearest condition and lists all of them.

        >>> FailCondition.parse("top-class changed on the same image > 2 %").quantity
        'answer'

        """
        words = " ".join(re.sub(r"([<>])(?=\S)", r"\1 ", re.sub(r"(?<=\S)([<>])", r" \1", text)).split()).lower()
        body, limit, is_count = words, 0.0, False
        if match := LIMIT_PATTERN.fullmatch(words):
            body, is_count = match[1].strip(), match[3].startswith("image")
            limit = float(match[2]) if is_count else float(match[2]) / PERCENT
            if not is_count and limit >= 1:
                raise InputError(f"condition {text!r}: {match[2]} % can never be exceeded; expected less than 100 %")
        for quantity, pattern in CONDITION_PATTERNS.items():
            if match := re.fullmatch(pattern, body):
                groups = match.groupdict()
                threshold = None if groups.get("threshold") is None else float(groups["threshold"])
                if threshold is not None and not -1 <= threshold <= 1:
                    raise InputError(f"condition {text!r}: the bound is {threshold:g}; expected at most 1 in magnitude")
                return cls(text, quantity, threshold, limit, is_count, groups.get("method"))
        raise build_unknown_condition_error(text, RUN_CONDITION_EXAMPLES)

    def check(self, n_met: int, n_compared: int, ids: Sequence[str] = ()) -> "ConditionResult":
        """Return the result for `n_compared` images, of which `n_met` fulfill the condition."""
        if not n_compared:
            return ConditionResult(self.text, None, 0, 0, reason="no image has this value in both runs")
        holds = n_met > self.limit if self.is_count else n_met / n_compared > self.limit
        low, high = compute_exact_interval(n_met, n_compared)
        return ConditionResult(self.text, holds, n_met, n_compared, low, high, tuple(ids))


@dataclass(frozen=True)
class ConditionResult:
    """The result of a condition.

    Attributes:
        text: The condition.
        holds: Whether it holds, so that the gate fails. None if it cannot be checked.
        n_met: Images (or quantities of an audit) that fulfill it.
        n_compared: Images (or quantities) with a value in both runs.
        low: Lower end of the 95 % Clopper-Pearson interval of the share, or None.
        high: Upper end, or None.
        ids: The images (or quantities) that fulfill it.
        reason: Why it cannot be checked, or what was compared.

    >>> FailCondition.parse("status changed > 10 %").check(1, 20).holds
    False

    """

    text: str
    holds: bool | None
    n_met: int
    n_compared: int
    low: float | None = None
    high: float | None = None
    ids: tuple[str, ...] = ()
    reason: str = ""

    @property
    def share(self) -> float | None:
        """The share of images that fulfill the condition, 0..1."""
        return self.n_met / self.n_compared if self.n_compared else None

    @property
    def description(self) -> str:
        """The counts as text, such as `1 of 20 images (5.0 %, 95 % interval 0.1 to 24.9 %)`."""
        if self.low is None or self.high is None or self.share is None:
            return self.reason
        interval = f"95 % interval {PERCENT * self.low:.1f} to {PERCENT * self.high:.1f} %"
        return f"{self.n_met} of {plural(self.n_compared, 'image')} ({PERCENT * self.share:.1f} %, {interval})"


def choose_exit_code(results: Sequence[ConditionResult]) -> int:
    """Return 1 if a condition holds, 2 if none holds and at least one cannot be checked, and 0 otherwise."""
    if any(result.holds for result in results):
        return 1
    return 2 if any(result.holds is None for result in results) else 0


def build_unknown_condition_error(text: str, examples: Sequence[str]) -> InputError:
    """Build the error for text that is not a condition. It names the nearest example and lists all of them."""
    nearest = difflib.get_close_matches(text.lower(), examples, 1, 0)[0]
    listed = "; ".join(examples)
    return InputError(f"{text!r} is not a condition; nearest: {nearest!r}; conditions: {listed}")
