"""Audit an image classifier with attribution maps. Level 6. Needs the extra `audit`.

- `core`: the config, the cohort, what a stage works with (`context`), and the schema of the summary.
- `stages` run in order (`runner`). Each returns its part of the summary, from `performance`, `shortcuts` and `clustering`.
- `verdicts` follow from the results, and the `report` shows them. `audit_run` is the finished audit.
- `config_generation` writes a config, `demo` makes an example. `comparison` compares two audits that are comparable.
- `provenance` records what an audit was computed from. `verification` checks it against digests, tables and images.
"""

import importlib.util

from camscope.errors import MissingExtraError

if missing := [
    name  # each brings some of an audit. The extra brings all
    for name in ("pydantic", "pyarrow", "scipy", "sklearn", "skimage", "matplotlib", "jinja2")
    if importlib.util.find_spec(name) is None
]:
    raise MissingExtraError(missing[0], "audit")

from camscope.audit.audit_run import AuditRun, run_audit
from camscope.audit.core.config import Config
from camscope.audit.core.summary_schema import Summary, Verdict

__all__ = ["AuditRun", "Config", "Summary", "Verdict", "run_audit"]
