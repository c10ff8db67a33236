"""A drop-in for tensorflow_model_server: which versions serve, how are their requests batched and answered?

Reached only over the network. Start with `__main__.main`, `process.ModelServer`, `sessions.pool.SessionPool`.
"""
