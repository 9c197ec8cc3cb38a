"""Tables in 8 bits, for serving."""
