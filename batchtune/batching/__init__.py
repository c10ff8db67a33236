"""Batching parameters: which there are, whether they are legal, and how each server writes them down.

Produces `parameters.Configuration`: the parameters in TensorFlow Serving's names. One module reads and writes each
dialect.
Start with `parameters.validate`, `formats.read_batching_file`, `tfserving_file.rendered`.
"""
