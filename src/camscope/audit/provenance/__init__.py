"""Provenance: what an audit was computed from, as digests, versions and a log."""
