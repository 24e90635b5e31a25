"""`camscope demo --audit`: two nets with the same accuracy, one of which looks at a token, and two reports that say which."""

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from camscope.cli import base, mapping

if TYPE_CHECKING:
    from camscope.audit import AuditRun


def audits(output: Path, seed: int, *, overwrite: bool) -> None:
    """Train and audit both; print the verdicts that differ; open the reports where somebody sits at the terminal."""
    from camscope.audit import run
    from camscope.audit.demonstration import CLEAN, CONFOUNDED, phantom_audit
    from camscope.cli.audit import staged, tell_time

    made = []
    with mapping.resumable(output), base.remarks():
        for name, p in (("clean", CLEAN), ("confounded", CONFOUNDED)):
            with base.working(f"drawing radiographs and training the {name} net"):
                config = phantom_audit(output / name, p, seed=seed, overwrite=overwrite)
            with staged() as told:
                made.append(run(config, output / name / "audit", overwrite=overwrite, told=told, foreseen=tell_time))
    _tell(*made)
    for one in made:
        base.out().print(base.styled(("report  ", "bold"), (base.shown(one.report), "cyan")), soft_wrap=True)
        if sys.stdout.isatty():
            webbrowser.open(one.report.resolve().as_uri())


def _tell(clean: "AuditRun", confounded: "AuditRun") -> None:
    """A line for each verdict that differs."""
    from camscope.audit.comparing import changes

    table = base.table("claim", "clean", "confounded")
    for one in changes(clean.verdicts, confounded.verdicts):
        table.add_row(base.shown(one.claim), one.first, one.second)
    areas = [run.summary.predict.findings[0].auroc.value or 0.0 for run in (clean, confounded)]
    base.out().print(base.styled(("AUROC   ", "bold"), (f"clean {areas[0]:.3f}, confounded {areas[1]:.3f}", "")))
    base.out().print(table)
