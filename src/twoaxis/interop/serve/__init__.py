"""A server of one model with the OpenAI API.

From the model outwards: `scheduler` runs many requests as one batch of `generation`; `completions` turns tokens into text and
responses; `protocol` parses requests; `work` turns a request into generations; `http` is the network. Only `http` needs the
extra `twoaxis[serve]`.
"""
