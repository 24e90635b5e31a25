"""An audit that finds a shortcut
==============================

Two classifiers of radiographs have the same accuracy. One looks at the lesion, the other at a marker in the corner. An audit
tells them apart.

**This page is not executed** when the documentation is built, since it takes several minutes. Needs `pip install ".[audit]"`.
`python examples/medical_audit.py --quick` trains both models on synthetic radiographs, audits both, and prints the verdicts
that differ. Each audit writes a report, whose first page looks like this:

.. image:: ../explanation/audit/front.webp
   :alt: The first page of the report of an audit

:doc:`/explanation/audit` describes what is measured.
"""

# %%
# Two studies, two audits
# -----------------------
# `write_demo_study` draws the images of a study, trains a classifier, and writes the configuration of an audit. The audits
# remove regions, insert markers and compare the answers.

import argparse
from pathlib import Path

from camscope import audit
from camscope.audit.audit_comparison import find_verdict_changes
from camscope.audit.demo_dataset_and_model import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study


def main(arguments: list[str] | None = None) -> None:
    """Two studies, two nets, two audits, two reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("medical-audit"), help="where everything goes")
    parser.add_argument("--images", type=int, default=200, help="audited, of each study (200)")
    parser.add_argument("--quick", action="store_true", help="without what is told of the maps themselves")
    chosen = parser.parse_args(arguments)
    runs = []
    for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
        config = write_demo_study(chosen.output / name, p, n_images=chosen.images)
        if chosen.quick:
            config = config.model_copy(update={"skip": ("faithfulness", "sanity", "robustness")})
        runs.append(audit.run_audit(config, chosen.output / name / "audit"))
        auroc = runs[-1].summary.predict.performance[0].auroc
        print(f"{name:>10}: AUROC {auroc.value:.3f}, report {runs[-1].report_path}")
    print()
    for one in find_verdict_changes(*(run.verdicts for run in runs)):
        print(f"{one.claim}\n    clean: {one.first}; confounded: {one.second}")


if __name__ == "__main__":
    main()
