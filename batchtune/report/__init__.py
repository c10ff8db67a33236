"""Results as texts and pages, for a terminal, a log or a file. Every unit is formatted here.

Out goes text. Start with `statement.print_recommendation`, `load_points.print_points`, `live.View`.
"""
