"""Which work of a model lies around its device part: before it, after it, and what it calls out for?"""
