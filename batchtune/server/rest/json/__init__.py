"""How does a JSON body become tensors, and how do outputs become JSON?"""
