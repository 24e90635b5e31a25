"""Methods computed by captum (extra `captum`) and zennit (extra `lrp`), registered only where these are installed."""
