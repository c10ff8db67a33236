"""Triton as a target: launched, attached to, reconfigured and put back."""
