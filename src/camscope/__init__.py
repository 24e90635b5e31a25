"""camscope."""
