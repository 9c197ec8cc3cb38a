"""Tables without their removed rows: for training on, and for serving."""
