"""The decoder: what it refuses, and what must not depend on how it is called."""
