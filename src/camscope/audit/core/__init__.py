"""What every part of an audit works on: the config, the cohort, the context, the predictions and the tables."""
