"""A two-tower model on interactions such as Gowalla's: trained wide, narrowed, served in 8 or 4
bits."""
