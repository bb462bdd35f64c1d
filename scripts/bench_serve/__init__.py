"""Measures a server under load: requests arrive at their own times, whether or not earlier ones are answered."""
