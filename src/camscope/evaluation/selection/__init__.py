"""Which method, at which layer: `build_candidates` are measured block by block, `candidates` drops the worse ones, `select` decides."""
