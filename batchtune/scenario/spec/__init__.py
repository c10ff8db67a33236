"""Which keys may a scenario have, and which values may each of them take?"""
