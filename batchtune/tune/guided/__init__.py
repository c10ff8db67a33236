"""Which configuration should be tried next, by a twin that is calibrated on the way?"""
