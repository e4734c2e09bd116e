"""What others wrote."""
