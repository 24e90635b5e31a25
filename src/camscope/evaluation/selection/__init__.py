"""Which method, at which layer: `candidates` are measured block by block, `racing` drops the worse ones, `select` decides."""
