"""What both front ends share of a call on a model: its deadline, its end, its count."""
