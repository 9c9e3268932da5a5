"""One paper, one file: what an island does in a round. Silent and pure: no clock, no randomness, no transport is imported here."""
