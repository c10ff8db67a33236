"""A drop-in for tensorflow_model_server: loads versions of models, batches requests and answers them.

The rest of the package reaches it only over the network. Begin to read at `__main__.main`,
`model_server.ModelServer` and `sessions.pool.SessionPool`.
"""
