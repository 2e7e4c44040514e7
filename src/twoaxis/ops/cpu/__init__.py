"""Operators as kernels in C for a CPU, which read each row from memory once.

`library.py` compiles them with the C compiler of the machine, once, and decides whether they serve a call. `operators.py` gives
them to the operators of torch's library whose GPU kernels are in `ops.gpu`: schema, gradient and rules are shared.
`cpu_only.py` has those of all other operators, `step_kernels.py` those of decoding.
"""
