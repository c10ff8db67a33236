"""Sessions: the requests of one signature become runs of the model, batched or not."""
