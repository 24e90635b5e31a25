"""Verification: an audit is checked against its digests, its tables, and the images."""
