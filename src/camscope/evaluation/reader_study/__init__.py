"""Evaluate the forms of a reader study: accuracy with and without maps, time, agreement and automation bias."""
