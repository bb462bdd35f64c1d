"""Recorded routing: files, recording, statistics, replay."""
