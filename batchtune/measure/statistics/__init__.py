"""How sure is a number? Distributions, quantiles, isotonic fits, paired comparisons."""
