"""Methods that are computed by captum (extra `captum`) or zennit (extra `lrp`), if these are installed."""
