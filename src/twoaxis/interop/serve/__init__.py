"""A server of one model with the OpenAI API.

From the model outwards: `engine` runs many requests as one batch, with `generation`; `answers` turns tokens into text and
answers; `protocol` parses requests; `work` turns a request into generations; `http` is the network. Only `http` needs the extra
`twoaxis[serve]`.
"""
