"""Logged values, and what Lightning keeps of them."""
