"""How is a request answered by several models in turn, as a `pipeline.yaml` declares?"""
