"""How does one process of the fleet run its part of a job?"""
