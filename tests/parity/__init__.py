"""Parity with the authors' own code: golden tensors in, our outputs and gradients compared."""
