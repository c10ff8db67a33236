"""How do tasks become batches, and which thread runs them? TensorFlow's schedulers, without tensors."""
