"""Which server is meant, what does it do under given traffic, how much can it take?"""
