"""How does a directory of files become a model that runs?"""
