"""How sure is a number? Distributions, quantiles, paired comparisons."""
