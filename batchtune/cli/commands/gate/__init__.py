"""Which commands guard what was reached?"""
