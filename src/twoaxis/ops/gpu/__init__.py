"""Operators as GPU kernels in Triton: when they run, how they are launched, and the kernels themselves.

`launch.py` decides whether kernels can serve a call and holds their block sizes. Each family is two files: the kernels, which
alone import Triton, and the operator that registers them with torch and adds the gradient. The plain form and the torch engine
of every operator are in `twoaxis.ops`. The operators are those of `ops.cpu` too.
"""
