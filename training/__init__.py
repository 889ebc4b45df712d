"""Training: a planner that chooses how to shard the model states, the executor that runs its plan, and adaptation."""
