"""A model audit: stages, verdicts, report. Floor 6. Needs the extra `audit`.

`config` says what is looked at and what was declared before; `subject` is that in memory. The `stages` run in order
(`running`), each makes its part of the `schema`, and `verdicts` and `limits` follow from the parts; the `report` shows them.
What stages are made of: `answers` of the model, `lines` of metrics (of `samples`), `shortcuts`, and `ways` of looking.
Around them: `starting` writes a config, `estimating` says how long it takes, `audited` is the finished audit with its tables
(`writing`) and its `provenance`; `comparing` holds two against one another that are `alike`; `verifying` holds one against its
digests, its summary against the tables it follows from (`following`), and some rows against the images (`recomputing`).
"""

import importlib.util

from camscope.errors import MissingExtraError

if missing := [
    name  # each brings some of an audit; the extra brings all
    for name in ("pydantic", "pyarrow", "scipy", "sklearn", "skimage", "matplotlib", "jinja2")
    if importlib.util.find_spec(name) is None
]:
    raise MissingExtraError(missing[0], "audit")

from camscope.audit.audited import AuditRun, run
from camscope.audit.config import Config
from camscope.audit.schema import Summary, Verdict

__all__ = ["AuditRun", "Config", "Summary", "Verdict", "run"]
