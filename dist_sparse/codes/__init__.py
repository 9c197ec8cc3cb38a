"""Tables that are looked up through codes: product quantization, trained in place."""
