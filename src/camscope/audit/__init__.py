"""Audit an image classifier with attribution maps. Level 6. Needs the extra `audit`.

- `core`: the config, the cohort, the data of a stage (`audit_context`), and the schema of the summary.
- `stages` run in order (`run_stages`). Each returns its part of the summary, from `performance`, `shortcuts` and `clustering`.
- `verdicts` follow from the results, and the `report` shows them. `run_audit_from_config` starts it, `finished_audit` reads it.
- `config_generation` writes a config, `demo_dataset_and_model` makes an example. `audit_comparison` compares two audits.
- `provenance` records what an audit was computed from. `verify_finished_audit` checks it against digests, tables and images.
"""

import importlib.util

from camscope.errors import MissingExtraError

if missing := [
    name  # each brings some of an audit. The extra brings all
    for name in ("pydantic", "pyarrow", "scipy", "sklearn", "skimage", "matplotlib", "jinja2")
    if importlib.util.find_spec(name) is None
]:
    raise MissingExtraError(missing[0], "audit")

from camscope.audit.core.config import Config
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.finished_audit import AuditRun
from camscope.audit.run_audit_from_config import run_audit

__all__ = ["AuditRun", "Config", "Summary", "Verdict", "run_audit"]
