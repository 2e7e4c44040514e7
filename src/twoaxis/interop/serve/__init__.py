"""A server of one model in the shapes of the OpenAI API.

From the model outwards: `engine` runs many requests as one batch, made of `generation`; `answers` turns tokens into text and
answers; `protocol` reads requests and holds their errors; `work` turns a request into generations; `http` is the network. Only
`http` needs the extra `twoaxis[serve]`.
"""
