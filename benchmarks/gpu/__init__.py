"""The parts of `python benchmarks/gpu_check.py`: what is measured, the process that measures it, and the result file."""
