"""The predictions of the model: performance, calibration, differences between subgroups, and leakage from features."""
