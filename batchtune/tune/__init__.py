"""Searches the batching parameters: what to try next, which rates a configuration held, and which one is best.

A sweep yields a `trials.trial.Trial` as each run ends; `answer.recommend` makes a `Recommendation` of all of them.
Start with `sweep.sweep.sweep`, `search.capacity`, `evidence.bracket`, `answer.recommend.recommend`.
"""
