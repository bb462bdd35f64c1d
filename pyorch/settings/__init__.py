"""What can be set: text parsed once at the door into typed values."""
