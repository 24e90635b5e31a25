"""The HTML report of an audit: verdicts, methods, results, and what was not tested."""
