"""A run on several processes.

`spread` is the part `parallel` of a recipe, `ranks` the processes, `placement` what one of them holds; `sharding` divides
parameters and the rows of a batch, `pipeline` cuts a decoder along depth into stages,
and `tensor` divides its sublayers by heads and hidden numbers.
"""
