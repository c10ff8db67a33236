"""What the samples mean: rates, quantiles with intervals, a verdict, and reasons for distrust.

Out goes `measurement.Measurement`.
Start with `measurement.measure`, `bottleneck.find_bottleneck`.
"""
