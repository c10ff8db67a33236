"""Which versions are loaded, which one answers a name, and how does each live and end?"""
