"""A model audit: stages, verdicts, report. Floor 6. Needs the extra `audit`."""
