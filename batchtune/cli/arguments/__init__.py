"""What do the words of a command line mean?"""
