"""Our models in other engines, for real: each script runs in an environment of its own and keeps what it found."""
