"""What camscope costs, beside the usual toolkits: `python -m benchmarks` in the project's root prints one table."""
