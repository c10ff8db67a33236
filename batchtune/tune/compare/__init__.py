"""By which factor do the variants of a scenario differ, block by block?"""
