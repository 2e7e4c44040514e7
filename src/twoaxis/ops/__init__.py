"""Floor 1: pure functions on tensors. Each keeps a plain reference next to its fast engine."""
