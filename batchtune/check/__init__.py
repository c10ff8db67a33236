"""Is it still as good as it was: which gates, after how many blocks, with which error rate?

Out goes a `Conclusion`. Start with `paired.run_check`.
"""
