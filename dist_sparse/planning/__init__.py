"""What a budget of bytes can hold, which of it to use, and a dry run of a level."""
