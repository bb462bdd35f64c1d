"""Measures a server under load: requests that arrive when they do, and not when the one before is answered."""
