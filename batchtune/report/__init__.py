"""How does a result read, on a terminal, in a log, in a file? Every unit is formatted here.

Out goes text. Start with `statement.print_recommendation`, `load_points.print_points`, `live.View`.
"""
