"""Which configuration should be deployed, why, and how sure is that?

Out goes `recommendation.Recommendation`.
Start with `recommendation.recommend`, `choice.choose`, `established.open_questions`.
"""
