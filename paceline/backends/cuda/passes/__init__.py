"""What runs a pass: its tables and buffers, KV pool, CUDA graphs, warm-up."""
