"""Running a pass: tables, buffers, KV pools, CUDA graphs, warm-up."""
