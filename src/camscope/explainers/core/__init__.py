"""Base classes of methods, and dispatch, inputs, baselines and maps."""
