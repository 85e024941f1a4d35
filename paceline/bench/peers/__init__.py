"""Other engines in processes of their own."""
