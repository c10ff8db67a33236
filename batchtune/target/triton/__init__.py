"""How is a Triton launched, attached to, reconfigured and put back?"""
