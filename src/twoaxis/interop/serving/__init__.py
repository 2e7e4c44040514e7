"""A server of one model in the shapes of the OpenAI API.

From the model outwards: `engine` runs many requests as one batch, `choice` makes text of their tokens, `protocol`
reads what clients send, `chat` turns messages into a prompt, `work` says what a request asks of the engine, `http` talks to the
network. Only `http` asks for the extra `twoaxis[serve]`.
"""
