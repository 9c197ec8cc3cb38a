"""What happened in a run: written while it trains, read afterwards."""
