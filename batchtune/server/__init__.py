"""A drop-in for tensorflow_model_server: versions that are loaded, requests that are batched and answered.

Reached only over the network. Start with `__main__.main`, `model_server.ModelServer`, `sessions.pool.SessionPool`.
"""
