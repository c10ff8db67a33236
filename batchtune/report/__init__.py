"""Results as texts and pages, for a terminal, a log or a file. Every unit is formatted here.

Out goes text. Start with `recommendation_text.print_answer`, `load_points.print_points`, `live_view.View`.
"""
