"""testtime."""
