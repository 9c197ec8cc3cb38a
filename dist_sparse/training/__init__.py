"""What keeps a model sparse while it trains."""
