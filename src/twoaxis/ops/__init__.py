"""Floor 1: pure functions on tensors. Each keeps a plain reference beside its fast engine."""
