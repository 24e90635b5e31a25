"""What every method is built on: the base classes, dispatch, inputs, baselines and maps."""
