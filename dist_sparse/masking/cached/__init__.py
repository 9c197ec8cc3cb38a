"""Scores that are kept between mask updates, so that only written rows are scored again."""
