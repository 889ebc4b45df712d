"""The planner: chooses how to shard the model states, and predicts memory and step time (AMSP, arXiv:2311.00257)."""
