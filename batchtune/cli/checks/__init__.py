"""What is installed on this machine, and is it usable?"""
