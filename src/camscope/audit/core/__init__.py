"""The shared data of all audit stages: config, cohort, context, predictions and summary."""
