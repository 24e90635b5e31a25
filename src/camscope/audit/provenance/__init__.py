"""Provenance of an audit: digests of its inputs, software versions and a log."""
