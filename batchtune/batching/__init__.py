"""Which batching parameters are meant, are they legal, and how does each server write them down?

Out goes `parameters.Configuration`: the knobs in TensorFlow Serving's names. One file reads and writes each dialect.
Start with `parameters.validate`, `tfserving.parse_tfserving_text`, `triton.format_triton`.
"""
