"""Whether a server is still as good as it was: the gates, blocks and error rates of a check.

Out goes a `Conclusion`. Start with `paired_check.run_check`.
"""
