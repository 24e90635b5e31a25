"""A model audit: stages, verdicts, report. Floor 6. Needs the extra `audit`.

`config` says what is looked at and what was declared before; `subject` is that in memory. The `stages` run in order
(`running`), each makes its part of the `schema`; what follows from the parts are the `verdicts` and `limits`; the `report`
shows them. Beside the maps stand the `performance` of the answers, `regions` and `interventions`, `masses` of maps in
regions, `leak` and `strategies`. `comparing` holds two audits against one another, `verifying` one against its digests.
"""

import importlib.util

from camscope.errors import MissingExtraError

if importlib.util.find_spec("pydantic") is None:
    raise MissingExtraError("pydantic", "audit")

from camscope.audit.audited import AuditRun, run
from camscope.audit.config import Config
from camscope.audit.schema import Summary, Verdict

__all__ = ["AuditRun", "Config", "Summary", "Verdict", "run"]
