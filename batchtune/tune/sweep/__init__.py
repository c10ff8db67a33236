"""How is a search carried through: budget, order, confirmation, progress, export?"""
