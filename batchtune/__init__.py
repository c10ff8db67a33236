"""Which batching parameters should this model be served with, on this hardware, under this traffic and SLO?"""

__version__ = "0.1.0"
