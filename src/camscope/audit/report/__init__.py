"""The report of an audit: one page with verdicts, methods, results, and what was not tested."""
