"""Engines that answer prompts."""
