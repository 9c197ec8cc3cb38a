"""Real jobs under the launcher, and the files that it writes."""
