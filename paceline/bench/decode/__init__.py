"""`paceline bench decode`: plain decoding and prefill beside llama.cpp."""
