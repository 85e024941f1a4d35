"""`paceline bench decode`: plain decoding and prefill compared with llama.cpp."""
