"""A run on several processes.

`layout` is the part `parallel` of a recipe, `ranks` the processes, `placement` what one of them holds; `sharding` divides
parameters and the rows of a batch, and `pipeline` cuts a decoder along depth into stages.
"""
