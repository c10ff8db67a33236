"""The search: what is tried next, what it held, and which configuration is best.

Out goes `trials.trial.Trial`, one by one, as each ends; then `answer.recommendation.Recommendation`.
Start with `sweep.sweep.sweep`, `search.capacity`, `evidence.bracket`, `answer.recommend.recommend`.
"""
