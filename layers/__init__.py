"""What a block consists of: attention, rotary position embeddings, and the linear layers of a rank."""
