"""Performance of the model: discrimination, calibration, subgroup differences, and leakage from features."""
