"""explain: the raw maps of every image, each method and finding, as a run of `camscope batch`."""

from collections import Counter

from camscope.audit.schema import Explain, Maps, Step
from camscope.audit.subject import Subject
from camscope.batch import Outcome, Run, run_batch
from camscope.errors import OUT_OF_MEMORY, RunError
from camscope.files import path_in
from camscope.wording import plural

CHUNK = 64  # images that are lost where an audit is stopped


def explain(subject: Subject) -> Explain:
    """Into `maps/`, which goes on where it was."""
    config = subject.config

    def told(outcome: Outcome) -> None:
        subject.told(outcome.before + outcome.images, outcome.total)

    outcome = run_batch(
        subject.tools,
        subject.shown,
        path_in(subject.folder, "maps"),
        [one.index for one in subject.findings],
        batch_size=config.batch_size,
        chunk=CHUNK,
        window=config.data.window,
        retry_failed=True,
        told=told,
    )
    if short := [reason for reason in outcome.transient if reason.startswith(OUT_OF_MEMORY)]:
        count = sum(outcome.transient[reason] for reason in short)
        raise RunError(
            f"{plural(count, 'image has', 'images have')} no map: {short[0]}; free some memory or lower "
            "batch_size, and start again: the audit goes on"
        )
    if outcome.failures == outcome.total:
        raise RunError(f"no image has a map: {outcome.reasons.most_common(1)[0][0]}")
    failures = [Step(name="no map", rows=count, reason=why) for why, count in sorted(outcome.reasons.items())]
    return Explain(maps=tuple(_maps(subject)), failures=tuple(failures))


def _maps(subject: Subject) -> list[Maps]:
    table = Run(subject.folder / "maps").table(["method", "target", "status"])
    seen = Counter(zip(*(table[name].to_pylist() for name in ("method", "target", "status")), strict=True))
    made = []
    for tool in subject.tools:
        for finding in subject.findings:
            own = {
                status: count
                for (method, target, status), count in sorted(seen.items())
                if (method, target) == (tool.title, str(finding.index))
            }
            failures = own.pop("failed", 0)
            made.append(
                Maps(method=tool.title, finding=finding.name, maps=sum(own.values()), failures=failures, statuses=own)
            )
    return made
