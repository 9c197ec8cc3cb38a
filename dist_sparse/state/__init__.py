"""What becomes of a model once it is trained: tables in 8 bits."""
