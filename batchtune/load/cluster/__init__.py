"""How do workers on several machines send one job together?"""
